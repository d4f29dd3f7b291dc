"""What the README says, done: its shell blocks run, its Python runs, what it names exists."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc.cli.serve import serve
from omni_grpc.config import ServerConfig, builtin_pipelines
from tests.running import BIN, ServerProcess
from tests.support import ROOT

README = ROOT / "README.md"
TARGET = "localhost:50051"
SPOKEN = re.compile(r"\bmake (serve|test)\b")


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines of all shell blocks, without comments and what makes or tests the whole."""
    joined = "".join(blocks("sh")).replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    return [line for line in lines if line and line[0] != "#" and not SPOKEN.search(line)]


def retargeted(command: str, target: str) -> str:
    """The command for a server that is elsewhere than the README's."""
    if re.match(r"omni-grpc (generate|describe)\b", command) and TARGET not in command:
        command += f" --target {target}"
    return command.replace(TARGET, target)


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(
        rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return found[1]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Where `echo` is served, in place of the README's server: the same contract, no model."""
    with ServerProcess("echo") as server:
        yield f"localhost:{server.await_serving()}"


def run(folder: Path, *command: str | Path, script: str = "") -> str:
    """What a program prints in that folder; it must succeed."""
    done = subprocess.run(
        command, input=script, cwd=folder, capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


def test_readme_has_commands() -> None:
    assert len(commands()) >= 4
    assert all(make in README.read_text() for make in ("make serve", "make test"))


def test_shell_commands_run_in_order(target: str, tmp_path: Path) -> None:
    # In a folder of its own, for what they write; what they read of the repository is linked.
    for name in (".venv", "README.md", "clients", "docs", "omni_grpc", "protos"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    script = "\n".join(retargeted(command, target) for command in commands())
    path = f'export PATH="{BIN}:$PATH"\n'
    printed = run(tmp_path, "bash", "-euo", "pipefail", script=f"{path}{script}\n")
    assert "omni_grpc.v1.OmniService" in printed
    assert "France" in printed


def test_shell_commands_leave_what_they_promise(target: str, tmp_path: Path) -> None:
    (generate,) = (line for line in commands() if line.startswith("omni-grpc generate"))
    path = f'export PATH="{BIN}:$PATH"\n'
    run(tmp_path, "bash", "-euo", "pipefail", script=f"{path}{retargeted(generate, target)}\n")
    written = re.findall(r"--out (\S+)", generate)
    assert written
    assert all((tmp_path / name).stat().st_size > 1000 for name in written)
    assert (tmp_path / "answer.wav").read_bytes()[:4] == b"RIFF"


def test_python_runs(target: str, tmp_path: Path) -> None:
    examples = blocks("python")
    assert examples
    for example in examples:
        printed = run(tmp_path, sys.executable, "-", script=example.replace(TARGET, target))
        assert "France" in printed


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for make in set(re.findall(r"\bmake ([a-z-]+)", README.read_text())):
        assert re.search(rf"^{make}:", makefile, re.MULTILINE), make


def test_every_pipeline_is_listed() -> None:
    listed = set(re.findall(r"^\| `([a-z0-9-]+)` \|", README.read_text(), re.MULTILINE))
    assert set(builtin_pipelines()) <= listed


def test_options_and_defaults_of_serve_are_those_of_the_code() -> None:
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    assert set(re.findall(r"(?<=`)--[a-z-]+", section("Settings"))) == options
    settings = ServerConfig()
    for option, default in {
        "--max-requests": settings.max_requests,
        "--drain-timeout": f"{settings.drain_timeout:g}",
    }.items():
        assert f"| `{option}` | {default} |" in section("Settings")
