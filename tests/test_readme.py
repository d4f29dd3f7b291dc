"""What the README says, done: its shell blocks run, its Python runs, what it names exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc.cli.serve import serve
from omni_grpc.config import ServerConfig, builtin_pipelines
from tests.balanced import free_ports
from tests.clients import LANGUAGES, build
from tests.documents import blocks, perform
from tests.running import ServerProcess
from tests.samples import page
from tests.support import ROOT

README = ROOT / "README.md"


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(
        rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return found[1]


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    """Where `echo` is served, in place of the README's server: the same contract, no model."""
    with ServerProcess("echo") as server:
        yield server.await_serving()


@pytest.mark.timeout(90)  # many commands, each a process
def test_what_it_says_can_be_done(echo_port: int, tmp_path: Path) -> None:
    found = blocks(README)
    assert {block.language for block in found if not block.options} == {"sh", "python"}
    printed = perform(found, tmp_path, echo_port)
    assert "omni_grpc.v1.OmniService" in printed
    # generate first, then grpcurl, and Python.
    assert printed.startswith("What is the capital of France?\n")
    assert '"finished": {' in printed
    assert printed.endswith("What is the capital of France? 0.6\n")
    assert (tmp_path / "answer.wav").read_bytes()[:4] == b"RIFF"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_in_other_languages_are_built_and_ask(echo_port: int, tmp_path: Path) -> None:
    for language in LANGUAGES:
        build(language)
    printed = perform(blocks(README), tmp_path, echo_port, word="toolchains", timeout=280)
    assert printed.count("What is the capital of France?") == len(LANGUAGES)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_pipelines_do_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_bytes(page("The library is closed on Monday."))
    (port,) = free_ports(1)
    printed = perform(blocks(README), tmp_path, port, word="models", timeout=280)
    assert "Paris" in printed
    starts = {name: (tmp_path / name).read_bytes()[:8] for name in OUTPUTS}
    assert {name: OUTPUTS[name] in start for name, start in starts.items()} == dict.fromkeys(
        OUTPUTS, True
    )


OUTPUTS = {
    "question.wav": b"RIFF",
    "answer.wav": b"RIFF",
    "explained.wav": b"RIFF",
    "ball.png": b"PNG",
    "film.mp4": b"ftyp",
}
"""Files that the README's commands write, and what they begin with."""


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for make in set(re.findall(r"\bmake ([a-z][a-z-]*)", README.read_text())):
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
