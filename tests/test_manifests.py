"""The manifests say what the code does: probe names, port, grace."""

from __future__ import annotations

from typing import Any

import yaml

from omni_grpc.config import ServerConfig
from omni_grpc.server import STOP_GRACE_S
from tests.support import ROOT

DEPLOYMENT = yaml.safe_load((ROOT / "k8s/base/deployment.yaml").read_text())
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]


def test_probes_ask_for_names_that_the_server_serves() -> None:
    source = (ROOT / "omni_grpc/health.py").read_text()
    names = {
        CONTAINER[probe]["grpc"]["service"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert names == {"omni-startup", "omni-readiness", "omni-liveness"}
    assert all(f'"{name}"' in source for name in names)


def test_ports_agree() -> None:
    port = CONTAINER["ports"][0]["containerPort"]
    arguments = CONTAINER["command"]
    assert arguments[arguments.index("--port") + 1] == str(port)
    assert {CONTAINER[p]["grpc"]["port"] for p in CONTAINER if p.endswith("Probe")} == {port}
    service = yaml.safe_load((ROOT / "k8s/base/service.yaml").read_text())
    assert service["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    assert (
        service["spec"]["selector"].items() <= DEPLOYMENT["spec"]["selector"]["matchLabels"].items()
    )


def test_the_grace_is_enough_to_drain_and_to_stop() -> None:
    settings = ServerConfig()
    needed = settings.drain_timeout + settings.stop_timeout + STOP_GRACE_S
    assert POD["terminationGracePeriodSeconds"] >= needed
