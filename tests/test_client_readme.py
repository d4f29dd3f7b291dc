"""What clients/python/README.md says, done: every block of Python runs."""

from __future__ import annotations

import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.markdown import Document, program, run
from tests.running import ServerProcess
from tests.support import ROOT

README = Document(ROOT / "clients/python/README.md")
# What is written by the block that names it.
FILES = ("answer.wav", "story.wav", "circle.png", "film.mp4")


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A server of pipelines that do what the blocks ask for, without a language model."""
    with ServerProcess("echo", "shapes", "shapes-live") as server:
        yield f"localhost:{server.await_serving()}"


@pytest.mark.parametrize("number", range(len(README.blocks("python"))))
def test_every_block_runs(target: str, tmp_path: Path, number: int) -> None:
    block = README.blocks("python")[number]
    printed = run(tmp_path, sys.executable, "-", script=program(block, target))
    assert bool(printed) == ("print(" in block)
    assert {path.name for path in tmp_path.iterdir()} == {name for name in FILES if name in block}
    for path in tmp_path.iterdir():
        match path.suffix:
            case ".wav":
                with wave.open(str(path)) as sound:
                    assert sound.getnframes() > 2400
            case ".png":
                with Image.open(path) as picture:
                    assert picture.size == (32, 32)
            case ".mp4":
                assert path.read_bytes()[4:8] == b"ftyp"


def test_links_lead_somewhere() -> None:
    assert README.dead_links() == []


def test_the_file_of_every_block_is_looked_at() -> None:
    for name in FILES:
        assert name in "".join(README.blocks("python"))
