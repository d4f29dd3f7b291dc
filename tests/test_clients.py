"""The clients in TypeScript, Go and Java: built from the contract, they pass the conformance list,
and do what their READMEs say. (Python's has tests of its own: test_client.py.)"""

from __future__ import annotations

import json
import subprocess
import time
import wave
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.clients import (
    CLIENTS,
    ENVIRONMENT,
    FOLDER,
    LANGUAGES,
    Client,
    build,
    run,
    run_list,
    shell_lines,
)
from tests.conformance.liar import Liar
from tests.conformance.run import LIST, WRONG, read_cases
from tests.running import ServerProcess
from tests.support import ROOT, echo

SILENCE_S = 45
"""With a ping every 10 s, long enough for a server that finds this too often to say so: gRPC's
forgives two."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Holder:
    """A client that holds its connection in silence, since `since`."""

    process: subprocess.Popen[str]
    connection: tuple[str, int]
    since: float


@pytest.fixture(scope="module")
def holders(conformance_address: str) -> Iterator[dict[str, Holder]]:
    """Clients that hold a connection while the other tests run, by language: all that can be
    built."""
    with ExitStack() as processes:
        found: dict[str, Holder] = {}
        for language in LANGUAGES:
            with suppress(pytest.skip.Exception):
                holder = found[language] = hold(build(language), conformance_address)
                processes.enter_context(holder.process)
                processes.callback(holder.process.kill)
        yield found


@pytest.fixture(scope="module", params=LANGUAGES)
def client(request: pytest.FixtureRequest, holders: dict[str, Holder]) -> Client:
    """A client, built."""
    return build(request.param)


def hold(client: Client, address: str) -> Holder:
    """A client that has made a call."""
    process = subprocess.Popen(
        (*client.hold, address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n", process.stdout.read()
    return Holder(process, connection(process, address), time.monotonic())


def connection(process: subprocess.Popen[str], address: str) -> tuple[str, int]:
    """The near end of the process's connection to the address; there is one."""
    port = int(address.rpartition(":")[2])
    ends = [
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process(process.pid).net_connections("tcp")
        if found.raddr and found.raddr.port == port and found.status == psutil.CONN_ESTABLISHED
    ]
    assert len(ends) == 1, ends
    return ends[0]


@pytest.fixture(scope="module")
def slow_echo() -> Iterator[str]:
    """Where an echo with a pause behind each word is served."""
    with ServerProcess(echo(defaults={"interval_ms": 500})) as server:
        yield f"127.0.0.1:{server.await_serving()}"


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    """A server that says what it is told to say, and keeps what it heard."""
    with Liar() as server:
        yield server


# ---------------------------------------------------------------- the list


def test_the_whole_list_passes(client: Client, conformance_address: str) -> None:
    names = [case["name"] for case in read_cases(LIST)]
    assert run_list(client, conformance_address, LIST) == {name: [] for name in names}


def test_its_runner_notices_what_is_wrong(client: Client, liar: Liar) -> None:
    found = run_list(client, liar.address, WRONG)
    noticed = {name: bool(problems) for name, problems in found.items()}
    assert noticed == {case["name"]: "right" not in case for case in read_cases(WRONG)}, found


def test_its_own_tests_pass(client: Client, conformance_address: str) -> None:
    done = run(*client.own_tests, timeout=100, OMNI_GRPC_TARGET=conformance_address)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the example


def test_the_example_prints_words_as_they_come_and_writes_speech(
    client: Client, slow_echo: str, tmp_path: Path
) -> None:
    out = tmp_path / "answer.wav"
    command = (
        *client.ask,
        "--target",
        slow_echo,
        "--out",
        str(out),
        "größe",
        "big",
        "new",
        "world",
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        # Nothing is written before the whole answer is there.
        assert process.poll() is None and not out.exists()
        printed = first + process.stdout.read()
    assert process.returncode == 0
    assert printed.decode() == "größe big new world\n"
    with wave.open(str(out)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24000, 1, 2)
        assert sound.getnframes() == 4 * 2400
        assert any(sound.readframes(100))


def test_the_example_says_why_it_fails(
    client: Client, conformance_address: str, tmp_path: Path
) -> None:
    aimed = (*client.ask, "--target", conformance_address)
    unknown = run(*aimed, "--pipeline", "nope", "hello", cwd=tmp_path)
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("NOT_FOUND PIPELINE_NOT_FOUND: ")
    blank = run(*aimed, "", cwd=tmp_path)
    assert blank.returncode == 1
    assert blank.stderr.splitlines()[0].startswith("INVALID_ARGUMENT INVALID_FIELD: ")
    assert blank.stderr.splitlines()[1] == "  prompt.text: is empty"
    assert not any(tmp_path.iterdir())


def test_the_token_and_the_deadline_travel(client: Client, liar: Liar, tmp_path: Path) -> None:
    aimed = (*client.ask, "--target", liar.address, "--timeout", "20")
    run(*aimed, "hello", cwd=tmp_path)
    assert "authorization" not in liar.heard[-1]
    run(*aimed, "--token", "secret", "hello", cwd=tmp_path)
    assert liar.heard[-1]["authorization"] == "Bearer secret"
    assert 5 < liar.heard[-1]["remaining_s"] <= 21


def test_the_commands_of_its_readme_run(
    client: Client, conformance_address: str, tmp_path: Path
) -> None:
    for name in ("clients", "protos", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "\n".join(shell_lines(FOLDER / client.language / "README.md"))
    assert "localhost:50051" in script
    script = script.replace("localhost:50051", conformance_address)
    done = run("bash", "-euo", "pipefail", "-c", script, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("What is the capital of France?\n")
    assert (tmp_path / "answer.wav").read_bytes().startswith(b"RIFF")


def test_the_javascript_of_nodes_readme_runs(conformance_address: str, tmp_path: Path) -> None:
    build("node")
    text = (FOLDER / "node/README.md").read_text()
    script = text.partition("```js\n")[2].partition("```")[0]
    assert script.count("localhost:50051") == 1
    script = script.replace("localhost:50051", conformance_address)
    done = run("node", "-e", script.replace("./clients/node", str(FOLDER / "node")), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "What is the capital of France? 28844",
        "Say hello.",
    ]


# ---------------------------------------------------------------- long connections


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_client_that_pings_every_ten_seconds_keeps_its_connection(
    language: str, holders: dict[str, Holder], conformance_address: str
) -> None:
    build(language)
    holder = holders[language]
    time.sleep(max(0.0, holder.since + SILENCE_S - time.monotonic()))
    assert holder.process.poll() is None
    assert connection(holder.process, conformance_address) == holder.connection
    output, _ = holder.process.communicate(timeout=25)
    assert (holder.process.returncode, output) == (0, "")


# ---------------------------------------------------------------- what builds them


@pytest.mark.parametrize(("language", "package"), [("go", "golang-go"), ("java", "libgrpc-java")])
def test_where_packages_cannot_be_installed_they_are_named(
    language: str, package: str, tmp_path: Path
) -> None:
    # A machine without any package, and a user who is not root.
    for name, prints in (("dpkg-query", ""), ("id", "1000")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {prints}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{ENVIRONMENT['PATH']}"
    done = run(ROOT / "scripts/toolchains", language, PATH=path)
    assert done.returncode == 1
    assert f"the {language} client needs: apt-get install" in done.stderr
    assert package in done.stderr.split()


def test_toolchains_of_other_languages_are_unknown() -> None:
    done = run(ROOT / "scripts/toolchains", "fortran")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def test_npms_packages_are_pinned_and_name_no_registry() -> None:
    package = json.loads((FOLDER / "node/package.json").read_text())
    locked = json.loads((FOLDER / "node/package-lock.json").read_text())["packages"]
    for kind in ("dependencies", "devDependencies"):
        assert locked[""][kind] == package[kind]
        for name, version in package[kind].items():
            assert locked[f"node_modules/{name}"]["version"] == version, name
    assert all("integrity" in entry for name, entry in locked.items() if name)
    assert not any("resolved" in entry for entry in locked.values())


def test_go_is_formatted() -> None:
    build("go")
    files = [file for file in (FOLDER / "go").glob("*/*.go") if file.parent.name != "build"]
    assert len(files) > 5
    done = run("gofmt", "-l", *files)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("language", LANGUAGES)
def test_readmes_say_how_it_is_built_and_how_it_runs_the_list(language: str) -> None:
    assert f"make -C clients/{language}" in shell_lines(FOLDER / language / "README.md")
    runner = " ".join(CLIENTS[language].conformance).replace(f"{ROOT}/", "")
    command = f"{runner} localhost:50051 tests/conformance/list.yaml"
    assert command in shell_lines(LIST.parent / "README.md")
