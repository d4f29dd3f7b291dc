"""The Python client against real servers: answers, events, errors, leaving, files of sound."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import sysconfig
import venv
import wave
import zipfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile
from packaging.requirements import Requirement
from PIL import Image

import omni_grpc_client
from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from omni_grpc_client import (
    AbortOutcome,
    Accepted,
    AddRequestRequest,
    AlreadyExistsError,
    AudioChunk,
    AudioEncoding,
    AudioFormat,
    CancelledCallError,
    DeadlineExceededError,
    Event,
    Finished,
    FinishReason,
    ImageChunk,
    ImageFormat,
    InternalError,
    InvalidArgumentError,
    Modality,
    NotFoundError,
    OmniCallError,
    OmniClient,
    ProtocolError,
    ResourceExhaustedError,
    SamplingParams,
    TextDelta,
    UnavailableError,
    WavWriter,
    make_params,
)
from tests.conftest import Serve
from tests.support import ROOT, echo, eventually, freed, in_flight

Response = service_pb2.AddRequestResponse
SLOW = {"text": {"outputs": 1000, "interval_ms": 50}}


@pytest.fixture
async def client(echo_server: Server) -> AsyncIterator[OmniClient]:
    """A client of `echo_server`, which must hold nothing when the test is over."""
    async with OmniClient(f"127.0.0.1:{echo_server.port}") as connected:
        yield connected
    await freed(echo_server)


# ---------------------------------------------------------------- answers and events


async def test_generate_gives_the_whole_answer(client: OmniClient) -> None:
    answer = await client.generate("hello big world", request_id="whole answer ü")
    assert answer.request_id == "whole answer ü"
    assert answer.text == "hello big world"
    assert answer.audio is not None
    assert answer.audio.format == AudioFormat(AudioEncoding.PCM_S16LE, 24000, 1)
    assert (answer.audio.samples, answer.audio.seconds) == (7200, 0.3)
    [picture] = answer.images
    assert Image.open(io.BytesIO(picture.data)).size == (picture.width, picture.height) == (32, 32)
    assert (answer.usage.prompt_tokens, answer.usage.audio_samples) == (3, 7200)
    assert answer.timings.first_output_ms.keys() == {"text", "audio", "image"}
    assert {finish.reason for finish in answer.finished.finish_reasons} == {
        FinishReason.STOP,
        FinishReason.COMPLETE,
    }


async def test_stream_gives_typed_events_in_order(client: OmniClient) -> None:
    events = [event async for event in client.stream("hello big world")]
    assert [event.seq for event in events] == list(range(len(events)))
    first, last = events[0], events[-1]
    assert isinstance(first, Accepted) and isinstance(last, Finished)
    assert first.stages == ("text", "audio", "image")
    assert [output.format for output in first.outputs] == [
        None,
        AudioFormat(),
        ImageFormat("image/png", 32, 32),
    ]
    assert {type(event) for event in events[1:-1]} == {TextDelta, AudioChunk, ImageChunk}
    sounds = [event for event in events if isinstance(event, AudioChunk)]
    assert [(s.stage, s.start_sample, s.samples) for s in sounds] == [
        ("audio", place * 2400, 2400) for place in range(3)
    ]


async def test_only_wanted_outputs_come(client: OmniClient) -> None:
    answer = await client.generate("hello", output_modalities=["audio"])
    assert answer.accepted.stages == ("text", "audio")
    assert answer.audio is not None and answer.audio.samples == 2400
    assert (answer.text, answer.images) == ("", ())


async def test_a_conversation_is_sent_as_messages(client: OmniClient) -> None:
    conversation = [("system", "Be brief."), ("user", "good day")]
    answer = await client.generate(conversation, output_modalities=[Modality.TEXT])
    assert answer.text == "good day"


async def test_a_whole_request_is_sent_as_it_is(client: OmniClient) -> None:
    request = AddRequestRequest(request_id="mine", prompt={"token_ids": {"ids": [7, 8]}})
    answer = await client.generate(request)
    assert (answer.request_id, answer.text) == ("mine", "7 8 ")
    with pytest.raises(ValueError, match="its own fields"):
        await client.generate(request, pipeline="echo")


async def test_large_outputs_fit_default_limits(client: OmniClient) -> None:
    size = 9 << 20
    params = {"image": {"bytes": size}, "audio": {"bytes": 1 << 20, "outputs": 1}}
    answer = await client.generate("x", stage_params=params)
    assert len(answer.images[0].data) == size
    assert answer.audio is not None and len(answer.audio.data) == 1 << 20


async def test_server_info_tells_what_is_served(client: OmniClient) -> None:
    info = await client.server_info()
    pipeline = info.pipeline()
    assert pipeline is not None and pipeline is info.pipeline("echo")
    assert info.pipeline("nope") is None
    assert [(s.name, s.params_kind, s.output) for s in pipeline.stages] == [
        ("text", "custom", Modality.TEXT),
        ("audio", "custom", Modality.AUDIO),
        ("image", "custom", Modality.IMAGE),
    ]
    assert pipeline.capabilities["output.audio"] is True
    assert pipeline.capabilities["prompt.embeds"] is False
    assert pipeline.max_duration == 600
    assert info.limits.max_receive_bytes == 64 << 20


async def test_load_counts_what_runs(client: OmniClient) -> None:
    async with aclosing(client.stream("x", stage_params=SLOW)) as events:
        await read_until(events, TextDelta)
        text = next(stage for stage in await client.load() if stage.stage == "text")
        assert (text.pipelines, text.replicas[0].running) == (("echo",), 1)
        assert text.replicas[0].ready
        assert text.replicas[0].kv_cache_use is None, "not known is not 0"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "kind", "reason", "path"),
    [
        ({"pipeline": "nope"}, NotFoundError, "PIPELINE_NOT_FOUND", None),
        (
            {"stage_params": {"text": {"bogus": 1}}},
            InvalidArgumentError,
            "INVALID_FIELD",
            "stage_params[0].custom.bogus",
        ),
        (
            {"stage_params": {"text": SamplingParams(temperature=0.5)}},
            InvalidArgumentError,
            "INVALID_FIELD",
            "stage_params[0].sampling",
        ),
        (
            {"output_modalities": ["text", "video"]},
            InvalidArgumentError,
            "INVALID_FIELD",
            "output_modalities[1]",
        ),
        ({"stage_params": {"text": {"fail_at": 0}}}, InternalError, "STAGE_ERROR", None),
        (
            {"stage_params": {"text": {"hang_at": 0}}, "timeout": 0.4},
            DeadlineExceededError,
            None,
            None,
        ),
    ],
)
async def test_a_failure_is_a_typed_error(
    client: OmniClient,
    fields: dict[str, Any],
    kind: type[OmniCallError],
    reason: str | None,
    path: str | None,
) -> None:
    with pytest.raises(kind) as caught:
        await client.generate("hello", **fields)
    error = caught.value
    assert type(error) is kind
    assert OmniCallError.by_code[error.code] is kind
    # Whose deadline is first, the client's or the server's, is a matter of luck.
    assert reason is None or error.reason == reason
    assert [violation.field for violation in error.violations] == ([path] if path else [])
    assert error.retry_after is None


async def test_a_full_server_says_when_to_retry(serve: Serve) -> None:
    served = await serve(echo(), max_requests=1)
    async with OmniClient(f"127.0.0.1:{served.server.port}") as client:
        async with aclosing(client.stream("x", stage_params=SLOW)) as events:
            await read_until(events, Accepted)
            with pytest.raises(ResourceExhaustedError) as caught:
                await client.generate("y")
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after is not None and caught.value.retry_after > 0
        assert caught.value.pod == served.server.pod


async def test_an_id_in_flight_is_refused(client: OmniClient) -> None:
    async with aclosing(client.stream("x", request_id="twin", stage_params=SLOW)) as events:
        await read_until(events, Accepted)
        with pytest.raises(AlreadyExistsError, match="twin"):
            await client.generate("y", request_id="twin")


async def test_nobody_there_is_unavailable() -> None:
    async with OmniClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError) as caught:
            await client.server_info(timeout=5)
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "")


async def test_a_client_must_be_entered() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await OmniClient("127.0.0.1:1").load()


async def test_unknown_modality_never_leaves(client: OmniClient) -> None:
    with pytest.raises(ValueError, match="smell"):
        await client.generate("x", output_modalities=["smell"])


def test_params_name_the_wrong_field() -> None:
    assert make_params("sampling", {"stop": ["a"], "seed": 5}) == SamplingParams(stop=["a"], seed=5)
    with pytest.raises(ValueError, match="max_tokenz"):
        make_params("sampling", {"max_tokenz": 5})


# ---------------------------------------------------------------- leaving


async def read_until(events: AsyncIterator[Event], kind: type[Event]) -> None:
    """Reads up to the first event of the kind."""
    async for event in events:
        if isinstance(event, kind):
            return
    raise AssertionError(f"no {kind.__name__} came")


async def test_breaking_out_aborts_the_request(echo_server: Server, client: OmniClient) -> None:
    async for event in client.stream("x", stage_params=SLOW):
        if isinstance(event, TextDelta):
            assert in_flight(echo_server) > 0
            break
    await freed(echo_server)


async def test_cancelling_the_reader_aborts_the_request(
    echo_server: Server, client: OmniClient
) -> None:
    reader = asyncio.create_task(client.generate("x", stage_params=SLOW))
    await eventually(lambda: in_flight(echo_server) > 0, within=5)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await freed(echo_server)


async def test_abort_ends_the_reader_with_an_error(client: OmniClient) -> None:
    async with aclosing(client.stream("x", request_id="doomed", stage_params=SLOW)) as events:
        await read_until(events, TextDelta)
        outcomes = await client.abort(["doomed", "stranger"])
        assert outcomes == {"doomed": AbortOutcome.ABORTED, "stranger": AbortOutcome.NOT_FOUND}
        with pytest.raises(CancelledCallError) as caught:
            await read_until(events, Finished)
    assert (caught.value.reason, caught.value.request_id) == ("ABORTED_BY_CLIENT", "doomed")
    assert await client.abort("doomed") == {"doomed": AbortOutcome.ALREADY_FINISHED}


# ---------------------------------------------------------------- servers that break the contract


@asynccontextmanager
async def scripted(
    responses: Sequence[Response], trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> AsyncIterator[OmniClient]:
    """A client of a server that answers every request with these responses; with trailers, it
    fails then."""

    class Servicer(service_pb2_grpc.OmniServiceServicer):
        async def AddRequest(
            self, request: AddRequestRequest, context: Any
        ) -> AsyncIterator[Response]:
            for response in responses:
                yield response
            if trailers:
                await context.abort(grpc.StatusCode.DATA_LOSS, "from a proxy", trailers)

    server = grpc.aio.server()
    service_pb2_grpc.add_OmniServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with OmniClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(0)


def sound(start_sample: int, *, rate: int = 24000, data: bytes = bytes(8)) -> dict[str, Any]:
    """An output with a few samples."""
    form = {"encoding": 1, "sample_rate_hz": rate, "channels": 1}
    audio = {"data": data, "start_sample": start_sample, "format": form}
    return {"output": {"stage": "voice", "audio": audio}}


def part(offset: int, *, last: bool) -> dict[str, Any]:
    """An output with a part of a picture, 4 bytes."""
    image = {"data": b"part", "mime_type": "image/png", "offset": offset, "last": last}
    return {"output": {"stage": "painter", "image": image}}


def numbered(*events: dict[str, Any]) -> list[Response]:
    """Responses with these events, numbered as they should be."""
    return [Response(**{"seq": place, **event}) for place, event in enumerate(events)]


ACCEPTED: dict[str, Any] = {"accepted": {"request_id": "r"}}
FINISHED: dict[str, Any] = {"finished": {}}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([ACCEPTED, {"seq": 2, "progress": {}}], "event 2 came where 1 was due"),
        ([ACCEPTED, {"seq": 0, "progress": {}}], "event 0 came where 1 was due"),
        ([{"progress": {}}, FINISHED], "accepted is first"),
        ([ACCEPTED, ACCEPTED], "accepted is first"),
        ([ACCEPTED, FINISHED, {"progress": {}}], "after finished"),
        ([ACCEPTED], "without finished"),
        ([], "without finished"),
        ([ACCEPTED, sound(0), sound(5), FINISHED], "start_sample is 5 where 4 was due"),
        ([ACCEPTED, sound(0), sound(4, rate=16000), FINISHED], "format changed"),
        ([ACCEPTED, sound(0, data=bytes(7)), FINISHED], "cuts a sample"),
        ([ACCEPTED, part(0, last=False), part(8, last=True), FINISHED], "offset is 8 where 4"),
    ],
)
async def test_broken_order_is_a_protocol_error(events: list[dict[str, Any]], message: str) -> None:
    async with scripted(numbered(*events)) as client:
        with pytest.raises(ProtocolError, match=message):
            await client.generate("x")


async def test_events_of_a_newer_contract_are_skipped() -> None:
    parts = (part(0, last=False), part(4, last=True), part(0, last=True))
    async with scripted(numbered(ACCEPTED, {}, {"output": {}}, *parts, FINISHED)) as client:
        answer = await client.generate("x")
    assert [image.data for image in answer.images] == [b"partpart", b"part"]
    assert answer.finished.seq == 6


async def test_a_status_of_others_is_a_plain_error() -> None:
    trailers = (("grpc-status-details-bin", b"\xff\xff no status"),)
    async with scripted(numbered(ACCEPTED), trailers) as client:
        with pytest.raises(OmniCallError, match="from a proxy") as caught:
            await client.generate("x")
    assert type(caught.value) is OmniCallError
    assert (caught.value.code, caught.value.reason) == ("DATA_LOSS", "")


# ---------------------------------------------------------------- files and packaging


def test_wav_of_16_bit_pcm_grows_chunk_by_chunk(tmp_path: Path) -> None:
    samples = np.arange(-300, 300, dtype="<i2").reshape(300, 2)
    path = tmp_path / "a.wav"
    with WavWriter(path, AudioFormat(sample_rate_hz=16000, channels=2)) as writer:
        for start in range(0, 300, 70):
            writer.write(samples[start : start + 70].tobytes())
        assert writer.samples == 300
        with pytest.raises(ValueError, match="whole samples"):
            writer.write(bytes(3))
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 2, 2)
        assert file.readframes(1000) == samples.tobytes()
    assert path.stat().st_size == 44 + samples.nbytes


def test_wav_of_floats_is_read_by_libsndfile() -> None:
    samples = np.linspace(-1, 1, 480, dtype="<f4")
    file = io.BytesIO()
    writer = WavWriter(file, AudioFormat(AudioEncoding.PCM_F32LE, 48000, 1))
    writer.write(samples.tobytes())
    writer.close()
    writer.close()
    file.seek(0)
    found, rate = soundfile.read(file, dtype="float32")
    assert rate == 48000
    np.testing.assert_array_equal(found, samples)


def test_unknown_encoding_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoding"):
        WavWriter(tmp_path / "a.wav", AudioFormat(AudioEncoding.UNKNOWN))
    assert not list(tmp_path.iterdir())


def installed(command: list[str | Path]) -> None:
    """Runs pip; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert done.returncode == 0, done.stderr


def clean_environment(folder: Path) -> Path:
    """The interpreter of an environment that holds the client's wheel, what this says that it
    needs, and nothing else."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet"]
    options: list[str | Path] = ["--no-deps", "--no-build-isolation", "-w", folder]
    installed([*pip, "wheel", *options, ROOT / "clients/python"])
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "clean", with_pip=False)
    python = folder / "clean/bin/python"
    installed([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    [site] = (folder / "clean").glob("lib/python*/site-packages")
    for name in [*requires(wheel), "typing-extensions"]:
        for top in {path.parts[0] for path in distribution(name).files or ()} - {"..", "."}:
            # Several of them share the folder `google`.
            with suppress(FileExistsError):
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return python


async def test_the_wheel_runs_without_the_server(echo_server: Server, tmp_path: Path) -> None:
    python = await asyncio.to_thread(clean_environment, tmp_path)
    code = (
        "import omni_grpc, sys; from omni_grpc_client import *; "
        f"client = OmniSyncClient('127.0.0.1:{echo_server.port}').__enter__(); "
        "print(client.generate('hello').text, omni_grpc.__file__); client.close(); "
        "print({'pydantic', 'rich', 'typer', 'numpy'} & set(sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", code, cwd=tmp_path, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out, err) == (0, b"hello None\nset()\n", b"")
    await freed(echo_server)


def test_the_wheel_holds_the_stubs_and_types_and_needs_little(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation"]
    installed([*build, "-w", tmp_path, ROOT / "clients/python"])
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"omni_grpc/v1/service_pb2_grpc.py", "omni_grpc_client/py.typed"} <= names
    assert "omni_grpc/__init__.py" not in names, "the server's package has that"
    assert not [name for name in names if "__pycache__" in name or name.startswith("hatch")]
    assert requires(wheel) == ["googleapis-common-protos", "grpcio", "protobuf"]


def requires(wheel: Path) -> list[str]:
    """The packages that a wheel says that it needs."""
    [name] = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(name).decode()
    found = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    return sorted(Requirement(one).name for one in found)


def test_all_exports_exist() -> None:
    assert sorted(omni_grpc_client.__all__) == omni_grpc_client.__all__
    missing = [name for name in omni_grpc_client.__all__ if not hasattr(omni_grpc_client, name)]
    assert not missing
