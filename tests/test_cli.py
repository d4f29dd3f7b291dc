"""The command line, as it is installed: against a real server, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import wave
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from PIL import Image

from omni_grpc import __version__
from omni_grpc.cli.call import CommandError
from omni_grpc.cli.generate import Wish
from omni_grpc.cli.plan import plan_call
from omni_grpc.server import Server
from omni_grpc.v1 import info_pb2, service_pb2, service_pb2_grpc
from omni_grpc_client import (
    CodecParams,
    Modality,
    PipelineInfo,
    SamplingParams,
    ServerInfo,
    ServerLimits,
    StageInfo,
)
from tests.support import IMAGE, eventually, freed, in_flight

COMMAND = Path(sys.executable).parent / "omni-grpc"
# Wide enough that no line is wrapped, and without colours.
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "xterm"}
SLOW = ("--set", "text.outputs=200", "--set", "text.interval_ms=100", "--modality", "text")


class Result(NamedTuple):
    """What a command left."""

    code: int | None
    out: str
    err: str


@asynccontextmanager
async def started(*arguments: str, **streams: Any) -> AsyncIterator[Process]:
    """The command, while it runs. It does not outlive the test."""
    process = await asyncio.create_subprocess_exec(
        COMMAND, *arguments, env=ENVIRONMENT, **{"stdout": PIPE, "stderr": PIPE, **streams}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def omni(*arguments: str, stdin: str = "") -> Result:
    """Runs the command to its end."""
    async with started(*arguments, stdin=PIPE) as process:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 20)
        return Result(process.returncode, out.decode(), err.decode())


def names(folder: Path) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.fixture
async def target(echo_server: Server) -> AsyncIterator[str]:
    """Where `echo_server` listens. It must hold nothing when the test is over."""
    yield f"127.0.0.1:{echo_server.port}"
    await freed(echo_server)


# ---------------------------------------------------------------- generate


async def test_generate_prints_text_and_says_a_summary(target: str) -> None:
    result = await omni("generate", "hello big world", "--target", target)
    assert (result.code, result.out) == (0, "hello big world\n"), result.err
    assert "3 tokens" in result.err and "first text after" in result.err
    assert "audio" not in result.err, "nobody asked for sound"


async def test_quiet_says_nothing_but_the_text(target: str) -> None:
    assert await omni("generate", "-", "-q", "--target", target, stdin="from a pipe\n") == (
        0,
        "from a pipe\n",
        "",
    )


async def test_text_is_printed_as_it_arrives(echo_server: Server, target: str) -> None:
    async with started("generate", "x", *SLOW, "--target", target) as process:
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readexactly(12), 10)
        assert first == b"word0 word1 "
        assert in_flight(echo_server) == 1, "the request goes on"


async def test_outputs_go_to_files_by_extension(target: str, tmp_path: Path) -> None:
    sound, picture, text = (tmp_path / name for name in ("a.wav", "a.PNG", "a.txt"))
    outs = [argument for path in (sound, picture, text) for argument in ("--out", str(path))]
    result = await omni("generate", "hello big world", *outs, "--target", target)
    assert result.code == 0, result.err
    with wave.open(str(sound)) as file:
        assert (file.getframerate(), file.getnframes()) == (24000, 7200)
        assert any(file.readframes(7200))
    with Image.open(picture) as image:
        assert image.size == (32, 32)
    assert text.read_text() == "hello big world"
    assert names(tmp_path) == {"a.wav", "a.PNG", "a.txt"}
    assert "0.30 s of audio" in result.err and f"wrote {sound}" in result.err


async def test_out_alone_says_which_modalities_are_wanted(target: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.wav")
    result = await omni("generate", "x", "--out", path, "--json", "--target", target)
    accepted = json.loads(result.out.splitlines()[0])
    assert [output["modality"] for output in accepted["outputs"]] == ["text", "audio"]


async def test_json_gives_one_object_per_event(target: str) -> None:
    result = await omni(
        "generate", "hi", "--json", "--modality", "audio", "--request-id", "j1", "--target", target
    )
    assert result.code == 0, result.err
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in events] == ["Accepted", "AudioChunk", "Finished"]
    assert [event["seq"] for event in events] == [0, 1, 2]
    assert events[0]["request_id"] == "j1"
    assert events[1]["data_bytes"] == 4800 and "data" not in events[1]
    assert events[2]["usage"]["audio_samples"] == 2400


async def test_a_system_message_goes_before_the_prompt(target: str) -> None:
    result = await omni("generate", "hi you", "--system", "Be brief.", "--target", target)
    assert (result.code, result.out) == (0, "hi you\n"), result.err


async def test_a_failed_call_leaves_files_as_they_were(target: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old.wav", tmp_path / "new.png"
    old.write_text("precious")
    outs = ("--out", str(old), "--out", str(new))
    result = await omni("generate", "a b c", *outs, "--set", "audio.fail_at=2", "--target", target)
    assert result.code == 1
    assert "omni-grpc: INTERNAL STAGE_ERROR: stage 'audio' failed" in result.err
    assert old.read_text() == "precious"
    assert names(tmp_path) == {"old.wav"}


async def test_an_output_that_never_came_is_a_failure(target: str, tmp_path: Path) -> None:
    outs = [f"--out={tmp_path / name}" for name in ("a.txt", "a.wav", "a.png")]
    result = await omni("generate", "x", *outs, "--set", "image.outputs=0", "--target", target)
    assert result.code == 1
    assert f"omni-grpc: {tmp_path / 'a.png'}: not written, no image came" in result.err
    assert not names(tmp_path), "all files or none"


async def test_silence_is_a_file_without_samples(target: str, tmp_path: Path) -> None:
    outs = [f"--out={tmp_path / name}" for name in ("a.txt", "a.wav")]
    result = await omni("generate", "x", *outs, "--set", "text.outputs=0", "--target", target)
    assert (result.code, result.out) == (0, ""), result.err
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24000)
    assert (tmp_path / "a.txt").read_bytes() == b""


async def test_ctrl_c_aborts_the_request(echo_server: Server, target: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "a.wav"))
    async with started("generate", "x", *SLOW, *out, "--target", target) as process:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(6), 10)
        assert in_flight(echo_server) > 0
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 5)
    assert process.returncode == 130
    assert err.decode().strip() == "omni-grpc: interrupted"
    await eventually(lambda: in_flight(echo_server) == 0)
    assert not names(tmp_path)


async def test_a_reader_that_has_enough_ends_the_call(echo_server: Server, target: str) -> None:
    read, write = os.pipe()
    async with started("generate", "x", *SLOW, "--target", target, stdout=write) as process:
        os.close(write)
        await eventually(lambda: in_flight(echo_server) == 1, within=10)
        os.close(read)
        _, err = await asyncio.wait_for(process.communicate(), 5)
    assert process.returncode == 1
    assert b"Traceback" not in err


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        (
            ["x", "--pipeline", "nope"],
            3,
            ["NOT_FOUND PIPELINE_NOT_FOUND: no pipeline 'nope'", "omni-grpc describe"],
        ),
        (
            ["x", "--set", "text.bogus=1"],
            2,
            ["INVALID_ARGUMENT INVALID_FIELD: stage_params[0].custom.bogus: is not one of"],
        ),
        (["x", "--set", "nope.a=1"], 2, ["no stage 'nope', only text, audio, image"]),
        (["x", "--set", "text"], 2, ["is not STAGE.FIELD=VALUE"]),
        (["x", "--max-tokens", "3"], 2, ["no stage of pipeline 'echo' samples tokens"]),
        (["x", "--seed", "3"], 2, ["no stage of pipeline 'echo' takes a seed"]),
        (["x", "--modality", "video"], 2, ["output_modalities[0]", "gives text, audio, image"]),
        (["x", "--modality", "smell"], 2, ["--modality", "smell"]),
        (["x", "--out", "a.xyz"], 2, ["the extension must be one of", ".wav"]),
        (["x", "--out", "/no/such/place/a.wav"], 2, ["No such file or directory"]),
        ([""], 2, ["prompt.text: is empty"]),
        (["x", "--timeout", "0.5", "--set", "text.hang_at=0"], 5, ["DEADLINE_EXCEEDED"]),
        (["x", "--set", "text.fail_at=0", "--request-id", "f1"], 1, ["STAGE_ERROR", "request f1"]),
    ],
)
async def test_errors_say_what_is_wrong(
    target: str, arguments: list[str], code: int, messages: list[str]
) -> None:
    result = await omni("generate", *arguments, "--target", target)
    assert result.code == code, result
    assert result.out == ""
    assert "Traceback" not in result.err
    for message in messages:
        assert message in result.err


@pytest.mark.parametrize("command", [["generate", "x"], ["describe"]])
async def test_a_server_that_is_not_there(command: list[str]) -> None:
    result = await omni(*command, "--target", "127.0.0.1:1")
    assert result.code == 4
    assert result.err.startswith("omni-grpc: UNAVAILABLE: ")
    assert "no server at 127.0.0.1:1: start one with `omni-grpc serve`" in result.err


# ---------------------------------------------------------------- describe, check, version


async def test_describe_shows_pipelines_and_stages(target: str) -> None:
    result = await omni("describe", "--target", target)
    assert result.code == 0, result.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines()]
    assert ["audio", "fake", "-", "cpu", "1/1", "text", "audio"] in rows
    for text in ("echo (default): ", "audio (24000 Hz", "600 s a request", "prompt.messages"):
        assert text in result.out


async def test_describe_json_holds_everything(target: str) -> None:
    result = await omni("describe", "--json", "--target", target)
    info = json.loads(result.out)
    assert info["server_version"] == __version__
    [pipeline] = info["pipelines"]
    assert [stage["name"] for stage in pipeline["stages"]] == ["text", "audio", "image"]
    assert pipeline["outputs"][1]["format"]["sample_rate_hz"] == 24000
    assert pipeline["capabilities"]["resumable"] in (True, False)


async def test_check_names_file_path_and_reason(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("name: mine\nstages:\n  - {name: only, engine: fake, output: text}\n")
    bad.write_text("name: mine\nstages:\n  - {name: only, engine: fake, output: smell}\n")
    result = await omni("check", str(good), "echo", str(bad), str(tmp_path / "none.yaml"))
    assert result.code == 2
    assert f"{good}: ok, pipeline 'mine': only" in result.out
    assert "echo: ok, pipeline 'echo': text → audio → image" in result.out
    assert f"{bad}:\n  stages[0].output: Input should be 'text'" in result.err
    assert f"{tmp_path / 'none.yaml'}: neither a file nor a built-in pipeline" in result.err
    assert (await omni("check", str(good))).code == 0


async def test_version() -> None:
    assert await omni("--version") == (0, f"omni-grpc {__version__}\n", "")


async def test_help_tells_exit_codes() -> None:
    result = await omni("generate", "--help")
    assert result.code == 0
    assert "Exit codes: 0 done" in result.out and "130 Ctrl-C" in result.out


# ---------------------------------------------------------------- progress


class Painter(service_pb2_grpc.OmniServiceServicer):
    """A server that says a line, shows progress, and gives a picture: echo has no long stage."""

    async def GetServerInfo(
        self, request: service_pb2.GetServerInfoRequest, context: Any
    ) -> service_pb2.GetServerInfoResponse:
        pipeline = info_pb2.PipelineInfo(
            name="painter",
            stages=[info_pb2.StageInfo(name="paint", engine="diffusion", output=IMAGE)],
            outputs=[{"stage": "paint", "modality": IMAGE}],
        )
        return service_pb2.GetServerInfoResponse(default_pipeline="painter", pipelines=[pipeline])

    async def AddRequest(
        self, request: service_pb2.AddRequestRequest, context: Any
    ) -> AsyncIterator[service_pb2.AddRequestResponse]:
        assert request.output_modalities == [IMAGE], "no text from a pipeline that has none"
        assert request.stage_params[0].diffusion.seed == 7
        image = {"data": b"png", "mime_type": "image/png", "last": True}
        events: list[dict[str, Any]] = [
            {"accepted": {"request_id": "r", "pipeline": "painter"}},
            {"output": {"stage": "say", "text": {"text": "half a line"}}},
            *({"progress": {"stage": "paint", "step": n, "total_steps": 4}} for n in (1, 2, 3)),
            {"output": {"stage": "paint", "image": image}},
            {"finished": {}},
        ]
        for seq, event in enumerate(events):
            yield service_pb2.AddRequestResponse(seq=seq, **event)
            await asyncio.sleep(0.15)


@pytest.fixture
async def painter() -> AsyncIterator[str]:
    """Where a Painter listens."""
    server = grpc.aio.server()
    service_pb2_grpc.add_OmniServiceServicer_to_server(Painter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_progress_is_a_bar_on_a_terminal(painter: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    screen, terminal = pty.openpty()
    arguments = ("generate", "x", "--seed", "7", "--out", str(path), "--target", painter)
    async with started(*arguments, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = await asyncio.wait_for(asyncio.to_thread(read_all, screen), 15)
        assert await process.wait() == 0, shown
    assert path.read_bytes() == b"png"
    before, after = shown.split("half a line", 1)
    assert "paint" not in before
    assert after.startswith("\r\n"), "a bar would be drawn over an open line"
    assert "paint" in after and "3/4" in after
    assert f"wrote {path}" in after


def read_all(terminal: int) -> str:
    """All that is written to a terminal until its last writer is gone."""
    data = b""
    try:
        while chunk := os.read(terminal, 4096):
            data += chunk
    except OSError:
        # Linux says EIO when the last writer has closed.
        pass
    os.close(terminal)
    return data.decode()


async def test_progress_stays_silent_without_a_terminal(painter: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    result = await omni("generate", "x", "--seed", "7", "--out", str(path), "--target", painter)
    assert (result.code, result.out) == (0, "half a line\n")
    assert "paint" not in result.err


async def test_no_text_and_no_file_is_refused(painter: str) -> None:
    result = await omni("generate", "x", "--target", painter)
    assert result.code == 2
    assert "pipeline 'painter' gives no text, only image" in result.err


# ---------------------------------------------------------------- options and stages


def stage(name: str, engine: str, output: Modality | None = None) -> StageInfo:
    """A stage as a server tells it."""
    return StageInfo(name, engine, "m", ("cpu",), 1, 1, (), output, {}, 0)


def served(*stages: StageInfo) -> ServerInfo:
    """A server of one pipeline with these stages."""
    pipeline = PipelineInfo("p", "", stages, (Modality.TEXT,), (), {}, 600, 60)
    return ServerInfo("0", 1, 1, {}, "p", (pipeline,), ServerLimits(0, 0, 0), "")


def wish(**fields: Any) -> Wish:
    """What the command line asks for, with `fields` set."""
    unset: dict[str, Any] = {
        "prompt": "x",
        "system": None,
        "pipeline": "",
        "modalities": ("text",),
        "out": (),
        "max_tokens": None,
        "temperature": None,
        "seed": None,
        "settings": (),
        "request_id": "",
        "timeout": None,
    }
    return Wish(**{**unset, **fields})


VOICE = served(
    stage("rewriter", "vllm"),
    stage("thinker", "vllm", Modality.TEXT),
    stage("talker", "codec"),
    stage("code2wav", "codec", Modality.AUDIO),
)


def test_options_reach_the_stages_that_they_mean() -> None:
    plan = plan_call(VOICE, wish(max_tokens=5, temperature=0.0, seed=3), [])
    assert plan.stage_params == {
        "rewriter": SamplingParams(seed=3),
        "thinker": SamplingParams(max_tokens=5, temperature=0.0, seed=3),
        "code2wav": CodecParams(seed=3),
    }


def test_settings_are_json_or_text_and_go_over_options() -> None:
    settings = ("thinker.max_tokens=9", 'thinker.stop=["a","b"]', "talker.voice=heart")
    plan = plan_call(VOICE, wish(max_tokens=5, settings=settings), [])
    assert plan.stage_params == {
        "thinker": SamplingParams(max_tokens=9, stop=["a", "b"]),
        "talker": CodecParams(voice="heart"),
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("thinker.max_tokenz=9", "max_tokenz"),
        ("thinker.max_tokens=many", "max_tokens"),
        ("talker.speed=fast", "speed"),
    ],
)
def test_a_setting_that_its_kind_lacks_is_refused(setting: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        plan_call(VOICE, wish(settings=(setting,)), [])
