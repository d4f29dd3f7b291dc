"""scripts/cluster-tools: a kubectl that builds components, where there is none."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts/cluster-tools"
OLD = "#!/bin/sh\necho 'Client Version: v1.20.2'\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="the package carries kubectl for Linux on x86_64 only",
    ),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with the tools that the script uses, and an old kubectl: what it must not take."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "sh", "uname"):
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    old = folder / "kubectl"
    old.write_text(OLD)
    old.chmod(0o755)
    return folder


def run(script: Path, path: Path, own: Path) -> subprocess.CompletedProcess[str]:
    """The script, which puts its kubectl into `own`."""
    environment = {"PATH": str(path), "PYTHON": sys.executable, "KUBECTL_DIR": str(own)}
    return subprocess.run([script], env=environment, capture_output=True, text=True)


def test_it_is_installed_once_and_builds(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    first = run(SCRIPT, path, own)
    assert first.returncode == 0, first.stderr
    kubectl = Path(first.stdout.strip())
    assert kubectl == own / "kubectl"
    before = kubectl.stat()
    assert run(SCRIPT, path, own).stdout == first.stdout
    assert kubectl.stat() == before
    overlay = ROOT / "k8s/overlays/multi-gpu"
    built = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    assert "kind: ScaledObject" in built.stdout, built.stderr


def test_another_file_than_the_published_one_is_refused(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    script = tmp_path / "scripts/cluster-tools"
    script.parent.mkdir()
    text = SCRIPT.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("sha256="))
    script.write_text(text.replace(line, "sha256=0"))
    script.chmod(0o755)
    done = run(script, path, own)
    assert done.returncode != 0
    assert "has the SHA-256" in done.stderr
    assert list(own.iterdir()) == []
