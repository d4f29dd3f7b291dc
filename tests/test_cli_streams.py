"""The command line where streams, locales and servers are not as usual, and what it says in
JSON."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import wave
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from tests.conftest import Serve
from tests.support import echo, eventually, freed, in_flight
from tests.test_cli import COMMAND, ENVIRONMENT, SLOW, omni, started
from tests.test_client_retry import Refusing, S, at, refused

# Not UTF-8.
ODD = b"\xff\xfe"


@pytest.fixture
async def target(echo_server: Server) -> AsyncIterator[str]:
    """Where `echo_server` listens. It must hold nothing when the test is over."""
    yield f"127.0.0.1:{echo_server.port}"
    await freed(echo_server)


async def shell(
    script: str, *arguments: str | bytes, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """What a shell makes of the script; "$@" is the command with these arguments."""
    return await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script, "bash", COMMAND, *arguments],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=20,
    )


# ---------------------------------------------------------------- text that is none


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([ODD], "the prompt: is not UTF-8"),
        (["x", "--system", ODD], "--system: is not UTF-8"),
        (["x", "--pipeline", ODD], "--pipeline: is not UTF-8"),
        (["x", "--request-id", ODD], "--request-id: is not UTF-8"),
        (["x", "--set", b"text." + ODD + b"=1"], "--set: is not UTF-8"),
    ],
)
async def test_arguments_that_are_no_text(
    target: str, arguments: list[str | bytes], message: str
) -> None:
    result = await shell('"$@"', "generate", *arguments, "--target", target)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == f"omni-grpc: {message}\n"


async def test_standard_input_that_is_no_text(target: str) -> None:
    result = await shell('printf "\\xff" | "$@"', "generate", "-", "--target", target)
    assert result.returncode == 2
    assert result.stderr.startswith(b"omni-grpc: standard input is not UTF-8")


async def test_text_is_utf8_whatever_the_locale(target: str) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = await shell(
        '"$@"', "generate", "grüß dich", "-q", "--target", target, PYTHONIOENCODING="utf-8",
        **ascii_only,
    )  # fmt: skip
    assert (result.returncode, result.stdout.decode()) == (0, "grüß dich\n"), result.stderr
    result = await shell('"$@"', "generate", "grüß dich", "-q", "--target", target, **ascii_only)
    assert (result.returncode, result.stdout) == (0, rb"gr\xfc\xdf dich" + b"\n"), result.stderr


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_streams_may_be_closed(target: str, closed: str, tmp_path: Path) -> None:
    out = tmp_path / "a.wav"
    result = await shell(f'"$@" {closed}', "generate", "hi", "--out", str(out), "--target", target)
    assert result.returncode == 0, result.stderr
    assert b"Traceback" not in result.stderr
    with wave.open(str(out)) as file:
        assert file.getnframes() == 2400
    assert result.stdout == (b"" if ">&-" in closed.split() else b"hi\n")


async def test_an_input_that_is_closed_holds_nothing(target: str, tmp_path: Path) -> None:
    arguments = ("speak", "--out", str(tmp_path / "a.wav"), "--target", target)
    result = await shell('"$@" <&-', *arguments)
    assert result.returncode == 2
    assert b"the input ended without ever holding anything" in result.stderr


@pytest.mark.parametrize("command", [["generate", "-"], ["speak", "--out", "a.wav"]])
async def test_an_input_that_cannot_be_read(
    target: str, command: list[str], tmp_path: Path
) -> None:
    result = await shell(f'cd {tmp_path} && "$@" <{tmp_path}', *command, "--target", target)
    assert result.returncode in (1, 2)
    assert b"Is a directory" in result.stderr.replace(b"is a", b"Is a")
    assert b"Traceback" not in result.stderr


async def test_a_disk_that_is_full(target: str) -> None:
    result = await shell('"$@" >/dev/full', "generate", "hi", "--target", target)
    assert result.returncode == 1
    assert b"omni-grpc: [Errno 28] No space left on device" in result.stderr
    assert b"Traceback" not in result.stderr


async def test_ctrl_c_while_it_waits_for_the_prompt(target: str) -> None:
    async with started("generate", "-", "--target", target, stdin=PIPE) as process:
        assert process.stdin is not None
        # More than a pipe holds: when it is gone, somebody reads.
        process.stdin.write(b"x" * (1 << 20))
        await asyncio.wait_for(process.stdin.drain(), 10)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    assert b"Traceback" not in err


# ---------------------------------------------------------------- servers


@pytest.mark.parametrize("target", ["", "  ", "http://localhost:50051"])
async def test_a_target_is_a_host_and_a_port(target: str) -> None:
    result = await omni("generate", "x", "--target", target)
    assert result.code == 2
    assert result.err.startswith(f"omni-grpc: --target {target!r}: is not HOST:PORT")


@pytest.mark.parametrize("timeout", ["inf", "1e30"])
async def test_a_timeout_without_an_end_is_none(target: str, timeout: str) -> None:
    result = await omni("generate", "hi", "--timeout", timeout, "-q", "--target", target)
    assert result == (0, "hi\n", "")


async def test_something_else_that_speaks_grpc() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        result = await omni("describe", "--target", f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert result.code == 1
    assert "serves something else, or an older release" in result.err


async def test_a_full_server_says_when_and_may_be_tried_again(serve: Serve) -> None:
    served = await serve(echo(), max_requests=1)
    target = f"127.0.0.1:{served.server.port}"
    async with started("generate", "x", *SLOW, "--target", target) as first:
        await eventually(lambda: in_flight(served.server) == 1, within=10)
        result = await omni("generate", "y", "--target", target)
        assert result.code == 4
        assert "RESOURCE_EXHAUSTED QUEUE_FULL" in result.err and "try again in" in result.err
        patient = asyncio.create_task(omni("generate", "y", "--retries", "99", "--target", target))
        _, pending = await asyncio.wait([patient], timeout=1.5)
        assert pending
        first.send_signal(signal.SIGINT)
        await first.wait()
        assert (await patient)[:2] == (0, "y\n")


async def test_by_default_nothing_is_tried_again() -> None:
    servicer = Refusing(refused(S.UNAVAILABLE, "DRAINING", "10"))
    async with at(servicer) as client:
        result = await omni("load", "--target", client.target)
        assert (result.code, len(servicer.calls)) == (4, 1)
        result = await omni("load", "--json", "--target", client.target)
        assert (result.code, result.out) == (0, "")


# ---------------------------------------------------------------- load, completion


async def test_load_is_a_table(echo_server: Server, target: str) -> None:
    async with started("generate", "x", *SLOW, "--target", target) as busy:
        await eventually(lambda: in_flight(echo_server) == 1, within=10)
        result = await omni("load", "--target", target)
        assert result.code == 0, result.err
        rows = [[c.strip() for c in line.split("│")[1:-1]] for line in result.out.splitlines()]
        [text] = [row for row in rows if row and row[0] == "text"]
        assert text[1:6] == ["echo", "0", "ready", "0", "1"]
        assert text[9] == "-", "what is not known is not 0"
        lines = (await omni("load", "--json", "--target", target)).out.splitlines()
        stages = {stage["stage"]: stage for stage in map(json.loads, lines)}
        assert stages.keys() == {"text", "audio", "image"}
        assert stages["text"]["replicas"][0]["running"] == 1
        busy.send_signal(signal.SIGINT)
        await busy.wait()


async def test_load_goes_on_as_it_changes() -> None:
    async with at(Refusing()) as client:
        result = await omni("load", "--watch", "--json", "--target", client.target)
        assert result.code == 0, result.err
        moments = [json.loads(line) for line in result.out.splitlines()]
        assert [moment["replicas"][0]["running"] for moment in moments] == [0, 1, 2]
        result = await omni("load", "--watch", "--target", client.target)
        assert (result.code, result.out.count("capacity")) == (0, 3)


async def test_load_is_watched_until_ctrl_c(echo_server: Server, target: str) -> None:
    async with started("load", "--watch", "--json", "--target", target) as watching:
        assert watching.stdout is not None
        assert await running_on(watching.stdout) == 0
        async with started("generate", "x", *SLOW, "--target", target) as busy:
            async with asyncio.timeout(15):
                while await running_on(watching.stdout) != 1:
                    pass
            busy.send_signal(signal.SIGINT)
            await busy.wait()
        watching.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(watching.communicate(), 10)
    assert watching.returncode == 130
    assert err.decode().strip() == "omni-grpc: interrupted"


async def running_on(lines: asyncio.StreamReader) -> int:
    """What the stage `text` runs at the next moment."""
    while True:
        stage = json.loads(await asyncio.wait_for(lines.readline(), 10))
        if stage["stage"] == "text":
            running: int = stage["replicas"][0]["running"]
            return running


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
async def test_shells_complete(kind: str) -> None:
    result = await omni("--show-completion", kind)
    assert result.code == 0
    assert "_OMNI_GRPC_COMPLETE" in result.out and "omni-grpc" in result.out


async def test_commands_and_options_are_completed() -> None:
    for words, expected in {
        "omni-grpc gen": ["generate"],
        "omni-grpc generate --max": ["--max-tokens"],
        "omni-grpc lo": ["load"],
    }.items():
        given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = await shell('"$@"', _OMNI_GRPC_COMPLETE="complete_bash", **given)
        assert result.stdout.decode().split() == expected, words


# ---------------------------------------------------------------- JSON


def records(text: str) -> list[dict[str, Any]]:
    """One per line."""
    return [json.loads(line) for line in text.splitlines()]


async def test_speech_in_json(target: str, tmp_path: Path) -> None:
    out = str(tmp_path / "a.wav")
    arguments = ("speak", "--json", "--out", out, "--target", target)
    result = await omni(*arguments, stdin="hello world\n")
    assert result.code == 0, result.err
    events = records(result.out)
    assert [event["event"] for event in events][:: len(events) - 1] == ["Accepted", "Finished"]
    sound = [event["data_bytes"] for event in events if event["event"] == "AudioChunk"]
    assert sum(sound) == 2 * 4800
    result = await omni("speak", "--json", "--out", "-", "--target", target)
    assert result.code == 2 and "stdout is for one of them" in result.err


async def test_an_error_in_json(target: str) -> None:
    script = ("--set", "text.fail_at=1", "--set", "text.interval_ms=200")
    arguments = (*script, "--modality", "text", "--request-id", "j2")
    result = await omni("generate", "a b", "--json", *arguments, "--target", target)
    assert result.code == 1
    events = records(result.out)
    assert events[0]["event"] == "Accepted"
    assert events[-1]["event"] == "Error"
    assert (events[-1]["code"], events[-1]["reason"]) == ("INTERNAL", "STAGE_ERROR")
    assert events[-1]["request_id"] == "j2"
    result = await omni("generate", "a", "--json", "--set", "text.bogus=1", "--target", target)
    [error] = records(result.out)
    assert error["violations"][0]["field"] == "stage_params[0].custom.bogus"
    assert result.code == 2 and "INVALID_FIELD" in result.err


async def test_everything_works_without_a_terminal(target: str) -> None:
    for command in (["describe"], ["load"], ["generate", "hi"], ["--help"], ["generate", "--help"]):
        aim = [] if "--help" in command else ["--target", target]
        result = await shell('"$@" | cat; exit ${PIPESTATUS[0]}', *command, *aim)
        assert result.returncode == 0, (command, result.stderr)
        assert b"\x1b" not in result.stdout
