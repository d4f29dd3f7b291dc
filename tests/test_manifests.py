"""The manifests say what the code does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.config import builtin_pipelines
from scripts.check_manifests import problems
from scripts.manifests.build import K8S
from scripts.manifests.pods import ANNOUNCED, known_options
from tests.manifests import COMPONENTS, OVERLAYS, built
from tests.running import ServerProcess, health_check

# Whichever test is first waits for all builds.
pytestmark = pytest.mark.timeout(120)


def test_there_is_a_build_of_each_overlay_and_component() -> None:
    wanted = {f"overlays/{name}" for name in OVERLAYS}
    assert set(built()) == wanted | {f"components/{name}" for name in COMPONENTS}
    assert {"cpu-demo", "one-gpu", "multi-gpu"} <= set(OVERLAYS)


@pytest.mark.parametrize(
    "name",
    [*(f"overlays/{name}" for name in OVERLAYS), *(f"components/{name}" for name in COMPONENTS)],
)
def test_what_is_built_is_right(name: str) -> None:
    assert list(problems(built()[name])) == []


def loose(schema: Any, path: str) -> Iterator[str]:
    """The objects of a schema that would take a field which it doesn't name."""
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        yield path
    for name, part in schema.get("properties", {}).items():
        yield from loose(part, f"{path}.{name}")
    yield from loose(schema["items"], f"{path}[]") if "items" in schema else ()


@pytest.mark.parametrize("path", sorted((K8S / "schemas").iterdir()), ids=lambda path: path.stem)
def test_schemas_of_others_kinds_are_strict(path: Path) -> None:
    # Metadata and pods are Kubernetes' own, and checked as such.
    own = ("metadata", "Template.spec")
    found = loose(json.loads(path.read_text()), "")
    assert [place for place in found if not place.endswith(own)] == []


def test_the_base_serves_the_pipeline_that_the_package_brings() -> None:
    ours = (K8S / "base/pipeline.yaml").read_text()
    assert ours == builtin_pipelines()["smol-voice"].read_text()


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_server_started_as_in_the_pod_answers_its_probes(
    started_as_in_the_pod: int, probe: str
) -> None:
    """A kubelet's view: one plain Check, one second."""
    (pod,) = built()["overlays/cpu-demo"].pods()
    assert pod.server is not None
    service = pod.server[probe]["grpc"]["service"]
    assert health_check(started_as_in_the_pod, service, timeout=1) == "SERVING"


@pytest.fixture(scope="module")
def started_as_in_the_pod() -> Iterator[int]:
    """The port of a server with the pod's own arguments, but for the pipeline and where it
    listens."""
    (pod,) = built()["overlays/cpu-demo"].pods()
    assert pod.server is not None
    own = ("--pipeline", "--host", "--port", "--metrics-port")
    arguments = [
        argument
        for argument in pod.server["args"][1:]
        if not argument.startswith(own)
        and argument.partition("=")[0] not in ANNOUNCED - known_options()
    ]
    with ServerProcess("echo", arguments=[*arguments, "--port=0"]) as server:
        yield server.await_serving()
