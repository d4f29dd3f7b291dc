"""What clients/python/README.md says, done: every block of Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.running import ServerProcess
from tests.support import ROOT

README = ROOT / "clients/python/README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
TARGET = "localhost:50051"

# What is written by the block that names it.
FILES = ("answer.wav", "story.wav", "circle.png", "film.mp4")

PRELUDE = f"""
import asyncio
from omni_grpc_client import *

async def main():
    async with OmniClient("{TARGET}") as client:
"""


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A server of pipelines that do what the blocks ask for, without a language model."""
    with ServerProcess("echo", "shapes", "shapes-live") as server:
        yield f"localhost:{server.await_serving()}"


def program(block: str, target: str) -> str:
    """A block as a program: as it is where it makes its own client, else what it says within
    `async with OmniClient() as client`, as the README tells."""
    if not re.search(r"Omni(Sync)?Client\(", block):
        block = PRELUDE + textwrap.indent(block, 8 * " ") + "\nasyncio.run(main())\n"
    return block.replace(TARGET, target)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(target: str, tmp_path: Path, number: int) -> None:
    block = BLOCKS[number]
    done = subprocess.run(
        [sys.executable, "-c", program(block, target)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == ("print(" in block)
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
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_blocks_and_files_are_found() -> None:
    assert len(BLOCKS) >= 9
    assert all(name in "".join(BLOCKS) for name in FILES)
