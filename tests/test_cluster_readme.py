"""What k8s/README.md says, done as far as that goes without a cluster and a container engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.check_manifests import problems
from scripts.manifests.build import K8S, Build, render
from scripts.manifests.pods import pods_of
from tests.manifests import tool
from tests.running import BIN, Command, ServerProcess
from tests.support import ROOT

README = K8S / "README.md"
# A certificate for the Secret of the example, made where it is needed.
CERTIFICATE = """if True:
    import datetime as d
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec
    key, now = ec.generate_private_key(ec.SECP256R1()), d.datetime.now(d.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "omni-grpc")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + d.timedelta(1))
    open("tls.crt", "wb").write(made.sign(key, hashes.SHA256()).public_bytes(s.Encoding.PEM))
    form = (s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    open("tls.key", "wb").write(key.private_bytes(*form))
"""


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """All commands, as arguments."""
    return [shlex.split(line) for line in "".join(blocks("sh")).splitlines() if line.strip()]


def of(*start: str) -> list[list[str]]:
    """The commands that start so, without what they start with."""
    return [line[len(start) :] for line in commands() if line[: len(start)] == list(start)]


@pytest.fixture(scope="module", name="tool")
def kubectl_of_tests() -> Path:
    """A kubectl that builds components."""
    return tool()


@pytest.fixture(scope="module")
def mine(tool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's own folder, beside a k8s/ of ours, with the example's kustomization."""
    root = tmp_path_factory.mktemp("mine")
    shutil.copytree(K8S, root / "k8s")
    folder = root / "mine"
    folder.mkdir()
    (example,) = blocks("yaml")
    (folder / "kustomization.yaml").write_text(example)
    shutil.copy(K8S / "overlays/one-gpu/pipeline.yaml", folder)
    return folder


def test_every_command_is_known_here() -> None:
    """None is skipped because no test below looks at it."""
    looked_at = (
        *("docker build", "kubectl apply -k", "kubectl kustomize .", "kubectl create namespace"),
        *("kubectl -n omni-grpc rollout status", "kubectl -n omni-grpc port-forward"),
        *("kubectl -n omni-grpc create secret tls", "omni-grpc generate", "omni-grpc check"),
    )
    lines = [" ".join(line) for line in commands()]
    assert len(lines) > 8
    assert [line for line in lines if not line.startswith(looked_at)] == []


def test_images_are_built_with_arguments_that_the_recipe_has(tool: Path) -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    tags = set()
    for arguments in of("docker", "build"):
        assert arguments[-1] == "."
        tags.add(arguments[arguments.index("-t") + 1])
        for place, argument in enumerate(arguments):
            if argument == "--build-arg":
                assert f"\nARG {arguments[place + 1].partition('=')[0]}=" in recipe
    used = {c["image"] for pod in shipped() for c in pod.containers}
    assert tags == used


def shipped() -> Iterator[Any]:
    """The pods of all overlays."""
    for overlay in (K8S / "overlays").iterdir():
        for item in render(overlay):
            yield from pods_of(item)


def test_what_is_applied_is_built(tool: Path, mine: Path) -> None:
    applied = [folder for (folder,) in of("kubectl", "apply", "-k")]
    assert applied
    for folder in applied:
        assert render(mine if folder == "." else ROOT / folder)


def test_the_readers_own_folder_is_right(mine: Path) -> None:
    build = Build("mine", render(mine))
    assert list(problems(build)) == []
    images = {c["image"] for pod in build.pods() for c in pod.containers}
    assert images == {"registry.example/omni-grpc:0.1.0-cuda"}


def test_components_of_the_table_are_all_that_there_are() -> None:
    listed = set(
        re.findall(r"^\| `((?:overlays|components)/[a-z-]+)` \|", README.read_text(), re.M)
    )
    there = {
        f"{kind}/{p.name}" for kind in ("overlays", "components") for p in (K8S / kind).iterdir()
    }
    assert listed == there


def test_what_is_asked_of_the_cluster_is_in_the_overlay(tool: Path) -> None:
    objects = render(K8S / "overlays/cpu-demo")
    there = {f"{o['kind'].lower()}/{o['metadata']['name']}": o for o in objects}
    for what, *_ in of("kubectl", "-n", "omni-grpc", "rollout", "status"):
        assert there[what]["metadata"]["namespace"] == "omni-grpc"
    for what, ports in of("kubectl", "-n", "omni-grpc", "port-forward"):
        spec, (_, _, port) = there[what]["spec"], ports.partition(":")
        # A pod's loopback port is no port of the Deployment's; component operators opens it.
        operators = (K8S / "components/operators/kustomization.yaml").read_text()
        assert port in {p["name"] for p in spec.get("ports", [])} or f"={ports}}}" in operators


def test_objects_that_are_made_by_hand_are_those_that_are_named(tool: Path, mine: Path) -> None:
    subprocess.run([sys.executable, "-c", CERTIFICATE], cwd=mine, check=True)
    dry = ["--dry-run=client", "-o", "yaml"]
    made = []
    for start in (("kubectl",), ("kubectl", "-n", "omni-grpc")):
        for arguments in of(*start, "create"):
            done = subprocess.run(
                [tool, *start[1:], "create", *arguments, *dry],
                cwd=mine,
                capture_output=True,
                text=True,
                # Nobody's cluster.
                env={**os.environ, "KUBECONFIG": "/dev/null"},
            )
            assert done.returncode == 0, done.stderr
            item = yaml.safe_load(done.stdout)
            made.append((item["kind"], item["metadata"]["name"]))
    assert made == [("Namespace", "omni-grpc"), ("Secret", "omni-grpc-tls")]
    (gateway,) = Build("", render(mine)).of("Gateway")
    assert gateway["spec"]["listeners"][0]["tls"]["certificateRefs"] == [{"name": "omni-grpc-tls"}]


def test_pipeline_is_checked_as_written(mine: Path) -> None:
    for arguments in of("omni-grpc", "check"):
        subprocess.run([BIN / "omni-grpc", "check", *arguments], cwd=mine, check=True, timeout=25)


def test_a_question_is_answered(tmp_path: Path) -> None:
    with ServerProcess("echo") as server:
        target = f"localhost:{server.await_serving()}"
        for arguments in of("omni-grpc", "generate"):
            command: Command = [BIN / "omni-grpc", "generate", *arguments, "--target", target]
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=25)
    assert (tmp_path / "answer.wav").read_bytes()[:4] == b"RIFF"
