"""Documents whose commands and programs tests run: any markdown file of the repository."""

from __future__ import annotations

import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

TARGET = "localhost:50051"
"""Where documents say that a server listens."""

COMMANDS = "generate|describe|load|speak|live"
"""Of omni-grpc, those that call a server."""

PRELUDE = """
import asyncio
from omni_grpc_client import *

async def main():
    async with OmniClient("localhost:50051") as client:
"""


@dataclass(frozen=True)
class Document:
    """A markdown file."""

    path: Path

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text()

    def blocks(self, language: str) -> list[str]:
        """The code blocks of a language, in order."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    def lines(self) -> list[str]:
        """The commands of all shell blocks, without comments."""
        joined = "".join(self.blocks("sh")).replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines()]
        return [line for line in lines if line and line[0] != "#"]

    def section(self, title: str) -> str:
        """The text below a heading, up to the next one."""
        pattern = rf"^## {title}\n(.*?)(?=^## |\Z)"
        found = re.search(pattern, self.text, re.MULTILINE | re.DOTALL)
        assert found is not None, title
        return found[1]

    def dead_links(self) -> list[str]:
        """Links to files that do not exist. There must be links."""
        links = re.findall(r"\]\((?!https?:)([^)#]+)", self.text)
        assert links
        return [link for link in links if not (self.path.parent / link).exists()]


def retargeted(command: str, target: str) -> str:
    """The command, or the program, for a server that is elsewhere than the document's."""
    if re.match(rf"omni-grpc ({COMMANDS})\b", command) and TARGET not in command:
        command += f" --target {target}"
    return command.replace(TARGET, target)


def program(block: str, target: str) -> str:
    """A block of Python as a program: as it is where it makes its own client, else what it says
    within `async with OmniClient() as client`."""
    if not re.search(r"Omni(Sync)?Client\(", block):
        block = PRELUDE + textwrap.indent(block, 8 * " ") + "\nasyncio.run(main())\n"
    return retargeted(block, target)


def run(folder: Path, *command: str | Path, script: str = "") -> str:
    """What a program prints in that folder; it must succeed."""
    done = subprocess.run(
        command, input=script, cwd=folder, capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


README = Document(ROOT / "README.md")
