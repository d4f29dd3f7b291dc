"""The server under a pod's restrictions: it writes into its folder for temporary files and, while
it prepares models, into the cache; and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc.embedded import cache_root, prepare
from tests import confined
from tests.recipe import environment
from tests.running import BIN, Command, ServerProcess
from tests.support import ROOT

pytestmark = pytest.mark.skipif(
    bool(confined.why_not()), reason=f"nothing can be confined here: {confined.why_not()}"
)

QUESTION = "What is the capital of France?"
OCR = """
name: reads
inputs: [image]
prompts: [media]
stages: [{name: reader, engine: ocr, model: "embedded:rapidocr", output: text}]
"""


@pytest.fixture
def tmp() -> Iterator[Path]:
    """The pod's /tmp. Not below pytest's folder: paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        yield Path(name)


def variables(image: dict[str, str], tmp: Path, cache: Path) -> dict[str, str]:
    """The image's own variables, its folders replaced by ours."""
    replaced = {
        name: value.replace("/tmp", str(tmp)).replace("/models", str(cache))
        for name, value in image.items()
    }
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    pythonpath = os.pathsep.join([str(ROOT), str(ROOT / "clients/python")])
    return {**replaced, "PATH": path, "PYTHONPATH": pythonpath}


def shared() -> set[Path]:
    """What lies in /dev/shm of the confined user."""
    return {path for path in Path("/dev/shm").iterdir() if path.lstat().st_uid == confined.USER}


def ask(server: ServerProcess, *options: str) -> str:
    """What the command line prints of an answer."""
    target = f"localhost:{server.await_serving()}"
    command: Command = [BIN / "omni-grpc", "generate", QUESTION, "--target", target, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def test_confined_programs_write_nowhere_else(tmp: Path) -> None:
    """The test's own tool: what follows would pass with one that confines nothing."""
    code = """if True:
        import os, sys
        print(os.getuid(), open(sys.argv[2]).read(4))
        open(sys.argv[1] + "/allowed", "w")
        for place in (*sys.argv[3:], "/tmp", "/var/tmp", "/root", "/dev", "/run"):
            try:
                open(place + "/forbidden", "w")
            except OSError:
                continue
            sys.exit(place)
    """
    places = [str(ROOT), str(Path.cwd()), str(BIN)]
    program = [sys.executable, "-c", code, str(tmp), str(ROOT / "README.md"), *places]
    command, settings = confined.confined(program, [tmp], {})
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{confined.USER} # om\n"
    assert [path.name for path in tmp.iterdir()] == ["allowed"]


@pytest.mark.parametrize("home", [None, "/nonexistent"])
def test_server_leaves_nothing_anywhere(
    tmp: Path,
    home: str | None,
) -> None:
    image = environment()
    own = variables(image, tmp, Path("/nonexistent"))
    if home is not None:
        own["HOME"] = home
    before = shared()
    with ServerProcess(
        "echo", wrap=lambda command: confined.confined(command, [tmp], own)
    ) as server:
        assert "France" in ask(server)
        assert server.end() == 0
        assert "Traceback" not in server.log
    assert list(tmp.iterdir()) == []
    assert shared() == before


def test_preparing_models_writes_into_the_cache(
    tmp: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "reads.yaml"
    file.write_text(OCR)
    cache = tmp_path / "models"
    cache.mkdir()
    own = variables(environment(), tmp, cache)
    program: Command = [BIN / "omni-grpc", "prepare", file]
    command, settings = confined.confined(program, [tmp, cache], own)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=25)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (cache / "models").glob("[!.]*")] == ["rapidocr-1.4.4-1"]
    assert list(tmp.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_real_models_run_from_a_cache_that_is_read_only(
    tmp: Path,
    tmp_path: Path,
) -> None:
    """As in an image that brings its models: they are there, and can't be changed."""
    prepare(["embedded:smollm2-135m-instruct", "embedded:hibari"], print)
    own = variables(environment(), tmp, cache_root())
    before = shared()
    with ServerProcess(
        "smol-voice", wrap=lambda command: confined.confined(command, [tmp], own)
    ) as server:
        server.await_log(r"Serving ", 480)
        spoken = tmp_path / "answer.wav"
        assert "Paris" in ask(server, "--out", str(spoken))
        assert spoken.read_bytes()[:4] == b"RIFF"
        assert server.end(seconds=30) == 0
        assert "Read-only" not in server.log
        assert "Permission denied" not in server.log
    # vLLM's queues outlive its processes when these are killed; in a pod they go with its volume.
    for left in shared() - before:
        left.unlink()
