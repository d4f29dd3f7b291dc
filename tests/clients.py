"""What tests of the clients share: the server that the conformance list asks for, and the clients
that are not Python's, built from what is here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.run import LIST
from tests.running import ServerProcess
from tests.support import ROOT

LANGUAGES = ("node", "go", "java")
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}


@dataclass(frozen=True)
class Client:
    """A built client: the commands that it brings."""

    language: str
    ask: tuple[str, ...]
    """Asks: --target, --pipeline, --token, --timeout in seconds, --out; then the prompt."""
    conformance: tuple[str, ...]
    """Runs a list: address, file."""
    own_tests: tuple[str, ...]
    """Its own tests. The address is in OMNI_GRPC_TARGET."""
    hold: tuple[str, ...]
    """Holds a connection to an address until its standard input ends, with a ping every 10 s."""


FOLDER = ROOT / "clients"
NODE, JAVA = FOLDER / "node/build", str(FOLDER / "java/run")
GO = FOLDER / "go/build"
CLIENTS = {
    "node": Client(
        "node",
        ask=("node", str(NODE / "examples/ask.js")),
        conformance=("node", str(NODE / "conformance/run.js")),
        own_tests=("node", "--test", str(NODE / "test/client.test.js")),
        hold=("node", str(NODE / "test/hold.js")),
    ),
    "go": Client(
        "go",
        ask=(str(GO / "ask"),),
        conformance=(str(GO / "conformance"),),
        own_tests=(str(GO / "omnigrpc.test"), "-test.v"),
        hold=(str(GO / "hold"),),
    ),
    "java": Client(
        "java",
        ask=(JAVA, "examples.Ask"),
        conformance=(JAVA, "conformance.Run"),
        own_tests=(JAVA, "client.ClientTest"),
        hold=(JAVA, "client.Hold"),
    ),
}


def build(language: str) -> Client:
    """The client, built; a build that has nothing to do takes a moment. Skips the test where its
    toolchain is missing and cannot be installed."""
    brought = run(ROOT / "scripts/toolchains", language, timeout=280)
    if brought.returncode != 0:
        pytest.skip(f"no toolchain: {brought.stderr.strip()}")
    built = run("make", "--no-print-directory", "-s", "-C", FOLDER / language, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    return CLIENTS[language]


def run(
    *command: str | Path, timeout: float = 25, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
    )


def run_list(client: Client, address: str, cases: Path) -> dict[str, list[str]]:
    """What the client's runner finds wrong, by case; nothing where a case passes."""
    done = run(*client.conformance, address, cases, timeout=100)
    found: dict[str, list[str]] = {}
    problems: list[str] = []
    for line in done.stdout.splitlines():
        if verdict := re.fullmatch(r"(ok|not ok) \d+ - (.+)", line):
            problems = found[verdict[2]] = [] if verdict[1] == "ok" else [line]
        elif line.startswith("  # "):
            problems.append(line.removeprefix("  # "))
    assert done.returncode == any(found.values()), done.stdout + done.stderr
    return found


def shell_lines(file: Path) -> list[str]:
    """The lines of the shell blocks of a Markdown file."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", file.read_text(), re.MULTILINE | re.DOTALL)
    return "".join(blocks).splitlines()


@pytest.fixture(scope="session")
def conformance_address() -> Iterator[str]:
    """Where the pipelines of the list are served, by the command that its README gives."""
    command, *arguments = shell_lines(LIST.parent / "README.md")[0].split()
    assert (command, arguments[0]) == ("omni-grpc", "serve")
    with ServerProcess(arguments=(*arguments[1:], "--port", "0")) as server:
        yield f"127.0.0.1:{server.await_serving()}"
