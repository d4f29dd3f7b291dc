"""Between the contract's messages and our types: what goes in comes out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from omni_grpc import types as t
from omni_grpc.cutter import Cutter
from omni_grpc.errors import InvalidField
from omni_grpc.v1 import common_pb2, output_pb2, service_pb2
from omni_grpc.wire.requests import decode_request, decode_tensor
from omni_grpc.wire.values import DATA_TYPE, MODALITY, decode_struct
from tests.support import encoded

DTYPES = {number: kind for number, kind in DATA_TYPE.items() if kind is not t.DataType.BFLOAT16}


def output_of(content: t.Content, stage: str = "s") -> output_pb2.Output:
    """The content as it is on the wire, parsed again."""
    data = encoded(3, 1, t.Output(stage, 2, 4, content)).SerializeToString()
    message = service_pb2.AddRequestResponse.FromString(data)
    assert (message.seq, message.epoch) == (3, 1)
    output = message.output
    assert (output.stage, output.index, output.segment) == (stage, 2, 4)
    return output


shapes = st.lists(st.integers(0, 5), max_size=4)


@given(st.sampled_from(sorted(DTYPES)), shapes, st.randoms(use_true_random=False))
def test_tensors_round_trip(number: int, shape: list[int], dice: Any) -> None:
    """numpy → message → our type → message → numpy, bit by bit."""
    kind = DTYPES[number]
    data = dice.randbytes(math.prod(shape) * kind.itemsize)
    sent = common_pb2.Tensor(data=data, dtype=number, shape=shape)  # type: ignore[arg-type]
    parsed = common_pb2.Tensor.FromString(sent.SerializeToString())
    tensor = decode_tensor(parsed, "t")
    assert (tensor.data, tensor.dtype, tensor.shape) == (data, kind, tuple(shape))
    array = np.frombuffer(tensor.data, kind.value).reshape(tensor.shape)
    assert array.tobytes() == data
    chunk = output_of(t.TensorChunk("n", tensor.data, tensor.dtype, tensor.shape)).tensor
    assert (chunk.data, chunk.dtype, list(chunk.shape)) == (data, number, shape)
    assert chunk.last


def test_item_sizes_are_numpys() -> None:
    assert {k: k.itemsize for k in DTYPES.values()} == {
        k: np.dtype(k.value).itemsize for k in DTYPES.values()
    }
    assert t.DataType.BFLOAT16.itemsize == 2


def test_a_scalar_is_one_element() -> None:
    tensor = decode_tensor(common_pb2.Tensor(data=b"\0" * 8, dtype=common_pb2.DATA_TYPE_INT64), "t")
    assert tensor.shape == ()


@given(st.sampled_from(sorted(DATA_TYPE)), shapes, st.integers(-3, 3).filter(bool))
def test_any_other_length_is_refused(number: int, shape: list[int], off: int) -> None:
    size = max(0, math.prod(shape) * DATA_TYPE[number].itemsize + off)
    if size == math.prod(shape) * DATA_TYPE[number].itemsize:
        return
    with pytest.raises(InvalidField) as caught:
        decode_tensor(
            common_pb2.Tensor(data=bytes(size), dtype=number, shape=shape),  # type: ignore[arg-type]
            "t",
        )
    assert caught.value.violations[0].field == "t.data"


@given(st.binary(max_size=200), st.integers(1, 3))
def test_bytes_round_trip(data: bytes, channels: int) -> None:
    audio = t.AudioFormat(16000, channels, t.AudioEncoding.PCM_F32LE)
    sound = output_of(t.AudioChunk(data, 2**40, audio)).audio
    assert (sound.data, sound.start_sample) == (data, 2**40)
    assert sound.format.encoding == common_pb2.AUDIO_ENCODING_PCM_F32LE
    assert (sound.format.sample_rate_hz, sound.format.channels) == (16000, channels)
    image = output_of(t.ImageChunk(data, "image/png", 3, 4, 5, False)).image
    assert (image.data, image.mime_type, image.width, image.height) == (data, "image/png", 3, 4)
    assert (image.offset, image.last) == (5, False)
    film = output_of(t.VideoChunk(data, "video/mp4", 6, 7, 8, 9, 10, True, ("a", "b"))).video
    assert (film.data, film.mime_type, film.chunk_index) == (data, "video/mp4", 6)
    assert (film.first_frame, film.frame_count, film.width, film.height) == (7, 8, 9, 10)
    assert film.last and list(film.active_event_ids) == ["a", "b"]


@given(st.text(), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_text_round_trips(text: str, tokens: list[int]) -> None:
    delta = output_of(t.TextDelta(text, tokens))
    assert delta.WhichOneof("content") == "text"
    assert (delta.text.text, list(delta.text.token_ids)) == (text, tokens)


def test_logprobs_keep_every_field() -> None:
    entry = t.TokenLogprobs(7, -0.5, 2, (t.CandidateLogprob(8, -0.25, 1, "x"),))
    text = output_of(t.TextDelta("", [7], [entry], [entry])).text
    for coded in (text.logprobs[0], text.prompt_logprobs[0]):
        assert (coded.token_id, coded.logprob, coded.rank) == (7, -0.5, 2)
        candidate = coded.candidates[0]
        assert (candidate.token_id, candidate.logprob) == (8, -0.25)
        assert (candidate.rank, candidate.text) == (1, "x")


@pytest.mark.parametrize("logprob", [-math.inf, -1e300])
def test_a_logprob_beyond_a_float_is_no_error(logprob: float) -> None:
    text = output_of(t.TextDelta("", [1], [t.TokenLogprobs(1, logprob)])).text
    assert text.logprobs[0].logprob == -math.inf


@pytest.mark.parametrize("reason", t.FinishReason)
@pytest.mark.parametrize("stopped_by", [None, "stop", "", 0, 7])
def test_finished_keeps_every_field(reason: t.FinishReason, stopped_by: Any) -> None:
    usage = t.Usage(1, 2, 3, 4, 5, 6)
    timings = t.Timings(1.5, 2.5, 3.5, {"a": 4.5}, {"text": 5.5}, 6.5)
    finish = t.StageFinish("a", 1, t.Finish(reason, stopped_by))
    message = encoded(0, 0, t.Finished((finish,), usage, timings)).finished
    coded = message.finish_reasons[0]
    assert (coded.stage, coded.index) == ("a", 1)
    assert output_pb2.FinishReason.Name(coded.reason) == f"FINISH_REASON_{reason.name}"
    kind = coded.WhichOneof("stopped_by")
    assert (getattr(coded, kind) if kind else None) == stopped_by
    assert [getattr(message.usage, f) for f in t.Usage.__struct_fields__] == [1, 2, 3, 4, 5, 6]
    assert message.timings.preprocess_ms == 1.5 and message.timings.total_ms == 6.5
    assert dict(message.timings.stage_ms) == {"a": 4.5}
    assert dict(message.timings.first_output_ms) == {"text": 5.5}


def test_progress_keeps_every_field() -> None:
    preview = t.Image(b"p", "image/png", 3, 4)
    progress = encoded(0, 0, t.StageProgress("s", t.Progress(2, 9, preview))).progress
    assert (progress.stage, progress.step, progress.total_steps) == ("s", 2, 9)
    assert (progress.preview.data, progress.preview.last) == (b"p", True)
    bare = encoded(0, 0, t.StageProgress("s", t.Progress(1))).progress
    assert not bare.HasField("preview")


def test_segment_end_keeps_every_field() -> None:
    end = encoded(0, 0, t.SegmentEnd(3, "s", t.FinishReason.LENGTH)).segment_end
    assert (end.segment, end.stage, end.reason) == (3, "s", output_pb2.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (t.AudioFormat(8000), "audio"),
        (t.ImageFormat("image/png", 1, 2), "image"),
        (t.VideoFormat("video/mp4", 1, 2, 24.0), "video"),
        (None, None),
    ],
)
def test_accepted_keeps_every_field(form: Any, field: str | None) -> None:
    formats = tuple(t.OutputFormat("s", kind, form) for kind in t.Modality)
    accepted = encoded(0, 0, t.Accepted("id", "p", ("a", "s"), formats)).accepted
    assert (accepted.request_id, accepted.pipeline) == ("id", "p")
    assert list(accepted.stages) == ["a", "s"]
    assert [MODALITY[o.modality] for o in accepted.outputs] == list(t.Modality)
    assert {o.WhichOneof("format") for o in accepted.outputs} == {field}


free_data = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), free_data, max_size=4))
def test_structs_round_trip(values: dict[str, Any]) -> None:
    message = Struct()
    message.update(values)
    assert decode_struct(message, "s") == values


@given(st.text(min_size=1), st.binary(min_size=1, max_size=50), st.text(max_size=256))
def test_prompts_round_trip(text: str, data: bytes, uuid: str) -> None:
    media = {"modality": common_pb2.MODALITY_AUDIO, "data": data, "uuid": uuid}
    message = service_pb2.AddRequestRequest(
        prompt={
            "messages": {"messages": [{"role": text, "parts": [{"text": text}, {"media": media}]}]}
        }
    )
    request = decode_request(
        service_pb2.AddRequestRequest.FromString(message.SerializeToString()), {}, None
    )
    expected = t.Media(t.Modality.AUDIO, data=data, uuid=uuid)
    assert request.prompt.content == t.Messages((t.Message(text, (t.Text(text), expected)),))


def test_options_keep_every_field() -> None:
    message = service_pb2.AddRequestRequest(
        prompt={"text": "x"},
        lora="l",
        priority=-3,
        data_parallel_rank=2,
        arrival_time={"seconds": 5, "nanos": 500_000_000},
        reasoning_ended=False,
        tokenization={
            "add_special_tokens": False,
            "truncate_prompt_tokens": 9,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "chat_template_kwargs": {"k": "v"},
        },
        cache_salt="",
        additional_information={"a": 1},
    )
    assert decode_request(message, {}, None).options == t.RequestOptions(
        lora="l",
        priority=-3,
        data_parallel_rank=2,
        arrival_time=5.5,
        reasoning_ended=False,
        tokenization=t.Tokenization(False, 9, True, False, {"k": "v"}),
        cache_salt="",
        additional_information={"a": 1.0},
    )
    bare = decode_request(service_pb2.AddRequestRequest(prompt={"text": "x"}), {}, None)
    assert bare.options == t.RequestOptions()


def test_every_enum_value_is_known() -> None:
    """Else a new one would be refused, or fail when it is sent."""
    for enum, known in ((common_pb2.Modality, MODALITY), (common_pb2.DataType, DATA_TYPE)):
        assert set(enum.values()) - {0} == set(known)
    named = {name.removeprefix("FINISH_REASON_") for name, _ in output_pb2.FinishReason.items()}
    assert named - {"UNSPECIFIED"} == {reason.name for reason in t.FinishReason}


def test_cut_sound_is_contiguous_on_the_wire() -> None:
    audio = t.Audio(bytes(300_000), t.AudioFormat(24000))
    chunks = [output_of(chunk).audio for chunk in Cutter().cut(audio)]
    start = 0
    for chunk in chunks:
        assert chunk.start_sample == start
        start += len(chunk.data) // 2
    assert start == 150_000 and len(chunks) > 1
