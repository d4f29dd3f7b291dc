"""A request that succeeds: the order of its events, what they hold, and what never runs."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import common_pb2, output_pb2
from tests.support import (
    AUDIO,
    IMAGE,
    TEXT,
    ask,
    collect,
    events,
    eventually,
    picture,
    rich_error,
    running,
    script,
    sound,
    started,
    texts,
)

STAGES: dict[int, str] = {TEXT: "text", AUDIO: "audio", IMAGE: "image"}
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.permutations(STAGES, size)]


async def test_accepted_is_first_and_finished_is_last(stub: Any) -> None:
    got = events(await collect(stub))
    assert got[0] == "accepted" and got[-1] == "finished"
    assert got.count("accepted") == got.count("finished") == 1
    assert set(got[1:-1]) == {"output"}


async def test_seq_counts_from_zero_without_a_gap(stub: Any) -> None:
    responses = await collect(stub, stage_params=[script(outputs=200), script("audio", outputs=50)])
    assert [r.seq for r in responses] == list(range(len(responses)))
    assert {r.epoch for r in responses} == {0}


@pytest.mark.parametrize(
    "text",
    [
        "x",
        " ",
        "two  spaces ",
        "line\nline\r\n\ttab",
        "Grüße 你好 👩‍👩‍👧 العربية",
        "\0null",
        "w " * 5000,
    ],
    ids=["letter", "space", "spaces", "lines", "unicode", "nul", "long"],
)
async def test_text_is_the_prompt_again(stub: Any, text: str) -> None:
    responses = await collect(stub, ask(text, output_modalities=[TEXT]))
    assert texts(responses) == text


async def test_sound_is_contiguous(stub: Any) -> None:
    responses = await collect(stub, ask("one two three four", output_modalities=[AUDIO]))
    expected = 0
    for response in responses:
        if response.WhichOneof("event") == "output":
            audio = response.output.audio
            assert audio.start_sample == expected
            assert len(audio.data) % 2 == 0
            expected += len(audio.data) // 2
    assert expected == 4 * 2400
    assert responses[-1].finished.usage.audio_samples == expected


async def test_one_picture_of_everything(stub: Any) -> None:
    responses = await collect(stub, ask("one two", output_modalities=[IMAGE]))
    assert picture(responses).startswith(b"\x89PNG\r\n")
    parts = [r.output.image for r in responses if r.output.HasField("image")]
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[0].width, parts[0].height, parts[0].mime_type) == (32, 32, "image/png")


async def test_what_a_request_gives_does_not_change(stub: Any) -> None:
    first, second = [await collect(stub, text="same same") for _ in range(2)]
    assert texts(first) == texts(second)
    assert sound(first) == sound(second)
    assert picture(first) == picture(second)


async def test_token_ids_are_echoed(stub: Any) -> None:
    responses = await collect(stub, prompt={"token_ids": {"ids": [1, 4294967295, 7]}})
    assert texts(responses) == "1 4294967295 7 "


async def test_the_last_message_is_echoed(stub: Any) -> None:
    messages = [
        {"role": "system", "parts": [{"text": "be kind"}]},
        {"role": "user", "parts": [{"text": "good"}, {"text": "day"}]},
    ]
    responses = await collect(stub, prompt={"messages": {"messages": messages}})
    assert texts(responses) == "good day"


# ---------------------------------------------------------------- wanted outputs


@pytest.mark.parametrize("wanted", [(), *SUBSETS], ids=lambda w: "-".join(STAGES[m] for m in w))
async def test_only_wanted_outputs_come(stub: Any, wanted: tuple[int, ...]) -> None:
    responses = await collect(stub, output_modalities=wanted)
    finals = {STAGES[m] for m in wanted} or set(STAGES.values())
    ran = [name for name in STAGES.values() if name in finals | {"text"}]
    assert list(responses[0].accepted.stages) == ran
    assert {o.stage for o in responses[0].accepted.outputs} == finals
    assert {r.output.stage for r in responses[1:-1]} == finals
    finished = responses[-1].finished
    assert sorted(f.stage for f in finished.finish_reasons) == sorted(ran)
    assert set(finished.timings.stage_ms) == set(ran)
    assert set(finished.timings.first_output_ms) == finals


async def test_text_only_wakes_no_other_stage(stub: Any, echo_server: Server) -> None:
    hanging = [script(outputs=5, hang_at=1)]
    call = await started(stub, stage_params=hanging, output_modalities=[TEXT])
    assert running(echo_server) == {"text": 1, "audio": 0, "image": 0}
    call.cancel()


async def test_all_outputs_wake_all_stages(stub: Any, echo_server: Server) -> None:
    call = await started(stub, stage_params=[script(outputs=5, hang_at=1)])
    await eventually(lambda: running(echo_server) == {"text": 1, "audio": 1, "image": 1})
    call.cancel()


async def test_stages_overlap(stub: Any) -> None:
    """The first sound comes before the last word."""
    responses = await collect(stub, stage_params=[script(outputs=5, interval_ms=100)])
    kinds = [r.output.WhichOneof("content") for r in responses[1:-1]]
    assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("text")


async def test_accepted_tells_the_formats(stub: Any) -> None:
    accepted = (await collect(stub))[0].accepted
    assert accepted.pipeline == "echo"
    form = {output.stage: output for output in accepted.outputs}
    assert [form[name].modality for name in STAGES.values()] == list(STAGES)
    assert form["audio"].audio.sample_rate_hz == 24000
    assert form["audio"].audio.channels == 1
    assert form["audio"].audio.encoding == common_pb2.AUDIO_ENCODING_PCM_S16LE
    assert form["image"].image.mime_type == "image/png"
    assert form["text"].WhichOneof("format") is None


async def test_every_sound_has_the_accepted_format(stub: Any) -> None:
    responses = await collect(stub)
    accepted = {o.stage: o for o in responses[0].accepted.outputs}["audio"].audio
    chunks = [r.output.audio for r in responses if r.output.HasField("audio")]
    assert chunks and all(chunk.format == accepted for chunk in chunks)


# ---------------------------------------------------------------- finished


async def test_finish_reasons_name_every_stage(stub: Any) -> None:
    finished = (await collect(stub))[-1].finished
    assert {f.stage: f.reason for f in finished.finish_reasons} == {
        "text": output_pb2.FINISH_REASON_STOP,
        "audio": output_pb2.FINISH_REASON_COMPLETE,
        "image": output_pb2.FINISH_REASON_COMPLETE,
    }
    assert {f.index for f in finished.finish_reasons} == {0}


async def test_usage_counts_what_was_used(stub: Any) -> None:
    responses = await collect(stub, text="one two three")
    usage = responses[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)
    assert usage.audio_samples == len(sound(responses)) // 2
    assert sum(len(r.output.text.token_ids) for r in responses) == usage.completion_tokens


async def test_timings_are_plausible(stub: Any) -> None:
    responses = await collect(stub, stage_params=[script(prepare_ms=60, outputs=2, first_ms=40)])
    timings = responses[-1].finished.timings
    assert 55 <= timings.preprocess_ms <= timings.total_ms
    assert 0 <= timings.queue_wait_ms < timings.total_ms
    assert timings.transform_ms == 0
    assert set(timings.stage_ms) == set(timings.first_output_ms) == {"text", "audio", "image"}
    assert all(0 < ms <= timings.total_ms for ms in timings.stage_ms.values())
    # The first word waits for prepare and for first_ms; a picture needs all words.
    assert 95 <= timings.first_output_ms["text"] <= timings.first_output_ms["image"]
    assert timings.first_output_ms["image"] <= timings.total_ms < 10_000


async def test_no_output_at_all_still_finishes(stub: Any) -> None:
    responses = await collect(stub, stage_params=[script(outputs=0)], output_modalities=[AUDIO])
    assert events(responses) == ["accepted", "finished"]
    finished = responses[-1].finished
    assert {f.stage for f in finished.finish_reasons} == {"text", "audio"}
    assert finished.usage.audio_samples == 0


# ---------------------------------------------------------------- identity


async def test_the_server_makes_an_id(stub: Any) -> None:
    first, second = [(await collect(stub))[0].accepted.request_id for _ in range(2)]
    assert first and second and first != second


async def metadata_of(stub: Any, **fields: Any) -> tuple[str, dict[str, str | bytes]]:
    """The accepted id, and the initial metadata."""
    call = stub.AddRequest(ask(**fields))
    metadata = dict(await call.initial_metadata())
    responses = [response async for response in call]
    return responses[0].accepted.request_id, metadata


async def test_initial_metadata_names_request_and_pod(stub: Any, echo_server: Server) -> None:
    made, metadata = await metadata_of(stub)
    assert metadata["omni-request-id"] == made
    assert metadata["omni-pod"] == echo_server.pod
    given, metadata = await metadata_of(stub, request_id="mine-1")
    assert given == metadata["omni-request-id"] == "mine-1"


@pytest.mark.parametrize("request_id", ["größe", "你好", "a\nb", "tab\t", "\x7f", "x" * 256])
async def test_an_unprintable_id_is_mirrored_percent_encoded(stub: Any, request_id: str) -> None:
    accepted, metadata = await metadata_of(stub, request_id=request_id)
    mirrored = metadata["omni-request-id"]
    assert isinstance(mirrored, str)
    assert accepted == request_id == unquote(mirrored)
    assert mirrored.isascii() and mirrored.isprintable()


@pytest.mark.parametrize(
    "request_id", ["a/b?c=d&e", "~!#$&'()*+,;:@[]^_`{|}<>\"\\", "in side", "100%"]
)
async def test_a_printable_id_is_mirrored_as_it_is(stub: Any, request_id: str) -> None:
    accepted, metadata = await metadata_of(stub, request_id=request_id)
    assert accepted == metadata["omni-request-id"] == request_id


async def test_trailers_of_a_success_name_the_pod(stub: Any, echo_server: Server) -> None:
    call = stub.AddRequest(ask())
    async for _ in call:
        pass
    assert dict(await call.trailing_metadata())["omni-pod"] == echo_server.pod


async def test_trace_ids_are_never_the_request_id(stub: Any) -> None:
    """Two requests of one trace run beside each other."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"), ("omni-request-id", trace))
    said = ["what the first one says", "and the second"]
    calls = [
        stub.AddRequest(ask(text, stage_params=[script(first_ms=100)]), metadata=metadata)
        for text in said
    ]
    ids = [(await anext(aiter(call))).accepted.request_id for call in calls]
    answers = [[r async for r in call] for call in calls]
    assert [texts(responses) for responses in answers] == said
    assert all(responses[-1].HasField("finished") for responses in answers)
    assert ids[0] != ids[1] and not any(trace in request_id for request_id in ids)


async def test_of_100_calls_with_one_id_one_is_accepted(stub: Any) -> None:
    request = ask(request_id="the-one", stage_params=[script(hang_at=0)])
    calls = [stub.AddRequest(request) for _ in range(100)]

    async def first(call: Any) -> str:
        try:
            return str((await call.read()).WhichOneof("event"))
        except grpc.aio.AioRpcError as error:
            return rich_error(error).reason

    outcomes = await asyncio.gather(*(first(call) for call in calls))
    assert sorted(outcomes) == ["DUPLICATE_REQUEST"] * 99 + ["accepted"]
    for call in calls:
        call.cancel()


async def test_an_id_can_be_used_again_after_the_end(stub: Any) -> None:
    for text in ("first", "second"):
        assert texts(await collect(stub, ask(text, request_id="again"))) == text


async def test_the_default_pipeline_can_be_named(stub: Any) -> None:
    responses = await collect(stub, pipeline="echo")
    assert responses[0].accepted.pipeline == "echo"


async def test_free_data_and_arrival_time_are_taken(stub: Any) -> None:
    request = ask(additional_information={"key": [1, "two", None]}, arrival_time={"seconds": 1})
    assert (await collect(stub, request))[-1].HasField("finished")


async def test_many_requests_at_once_do_not_mix(stub: Any) -> None:
    async def one(number: int) -> None:
        text = f"request number {number} says {number}"
        responses = await collect(stub, text=text)
        assert texts(responses) == text
        assert [r.seq for r in responses] == list(range(len(responses)))

    await asyncio.gather(*(one(number) for number in range(50)))
