"""What a client gets wrong is refused with the field's path, before anything starts."""

from __future__ import annotations

import math
import time
from typing import Any

import grpc
import pytest

from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.errors import InvalidField
from omni_grpc.server import Server
from omni_grpc.types import SamplingParams
from omni_grpc.v1 import common_pb2, params_pb2, prompt_pb2, service_pb2
from omni_grpc.wire.requests import decode_abort, decode_request, decode_tensor
from tests.support import TEXT, ask, broken_off, collect, pipeline, rich_error, script

S = grpc.StatusCode
U64 = (1 << 64) - 1

EMBEDS = {"dtype": common_pb2.DATA_TYPE_FLOAT32, "shape": [2, 4], "data": bytes(32)}
PNG = {"modality": common_pb2.MODALITY_IMAGE, "data": b"\x89PNG"}


def message(**fields: Any) -> dict[str, Any]:
    """A conversation of one message."""
    content = {"role": "user", "parts": [{"text": "hi"}]} | fields
    return {"prompt": {"messages": {"messages": [content]}}}


def params(kind: str, stage: str = "text", /, **fields: Any) -> dict[str, Any]:
    """Parameters of one stage."""
    return {"stage_params": [{"stage": stage, kind: fields}]}


def custom(**values: Any) -> dict[str, Any]:
    """A script of the text stage."""
    return {"stage_params": [script(**values)]}


def deep(levels: int) -> dict[str, Any]:
    """A Struct of that depth."""
    value: Any = 1
    for _ in range(levels):
        value = {"k": value}
    return {"additional_information": value}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    # Prompts.
    "no prompt": ({"prompt": {}}, "prompt"),
    "empty text": ({"prompt": {"text": ""}}, "prompt.text"),
    "no token ids": ({"prompt": {"token_ids": {}}}, "prompt.token_ids.ids"),
    "no messages": ({"prompt": {"messages": {}}}, "prompt.messages.messages"),
    "no role": (message(role=""), "prompt.messages.messages[0].role"),
    "no parts": (message(parts=[]), "prompt.messages.messages[0].parts"),
    "empty part": (message(parts=[{"text": "a"}, {}]), "prompt.messages.messages[0].parts[1]"),
    "a message that says nothing": (message(parts=[{"text": ""}]), "prompt"),
    "media beside messages": (
        {"prompt": {"messages": message()["prompt"]["messages"], "media": [PNG]}},
        "prompt.media",
    ),
    # Tensors.
    "tensor too short": ({"prompt": {"embeds": EMBEDS | {"data": b"1234"}}}, "prompt.embeds.data"),
    "tensor too long": ({"prompt": {"embeds": EMBEDS | {"data": bytes(33)}}}, "prompt.embeds.data"),
    "negative shape": ({"prompt": {"embeds": EMBEDS | {"shape": [-2, -4]}}}, "prompt.embeds.shape"),
    "no dtype": ({"prompt": {"embeds": EMBEDS | {"dtype": 0}}}, "prompt.embeds.dtype"),
    "unknown dtype": ({"prompt": {"embeds": EMBEDS | {"dtype": 99}}}, "prompt.embeds.dtype"),
    "one axis": ({"prompt": {"embeds": EMBEDS | {"shape": [8]}}}, "prompt.embeds.shape"),
    "huge shape": ({"prompt": {"embeds": EMBEDS | {"shape": [1 << 62] * 2}}}, "prompt.embeds.data"),
    # Media.
    "media without source": ({"prompt": {"media": [{"modality": 3}]}}, "prompt.media[0]"),
    "media of no kind": (
        {"prompt": {"media": [PNG | {"modality": 0}]}},
        "prompt.media[0].modality",
    ),
    "text as media": ({"prompt": {"media": [PNG | {"modality": 1}]}}, "prompt.media[0].modality"),
    "unknown kind": ({"prompt": {"media": [PNG | {"modality": 77}]}}, "prompt.media[0].modality"),
    "empty media": ({"prompt": {"media": [PNG, PNG | {"data": b""}]}}, "prompt.media[1].data"),
    "empty uri": (
        {"prompt": {"media": [{"modality": 3, "uri": ""}]}},
        "prompt.media[0].uri",
    ),
    "long uuid": ({"prompt": {"media": [PNG | {"uuid": "u" * 257}]}}, "prompt.media[0].uuid"),
    # Stages.
    "unknown stage": (params("custom", "nope"), "stage_params[0].stage"),
    "no stage": (params("custom", ""), "stage_params[0].stage"),
    "repeated stage": (
        {"stage_params": [script(), script("audio"), script()]},
        "stage_params[2].stage",
    ),
    "no parameters": ({"stage_params": [{"stage": "text"}]}, "stage_params[0]"),
    "sampling for fake": (params("sampling", n=1), "stage_params[0].sampling"),
    "diffusion for fake": (params("diffusion", steps=1), "stage_params[0].diffusion"),
    "codec for fake": (params("codec", "audio", speed=1), "stage_params[0].codec"),
    "65 stages": ({"stage_params": [script()] * 65}, "stage_params"),
    # The fake stage's script.
    "unknown key": (custom(wrods=3), "stage_params[0].custom.wrods"),
    "a string for a number": (custom(outputs="3"), "stage_params[0].custom.outputs"),
    "a word for a number": (custom(outputs="three"), "stage_params[0].custom.outputs"),
    "a list for a number": (custom(outputs=[3]), "stage_params[0].custom.outputs"),
    "a fraction of an output": (custom(outputs=2.5), "stage_params[0].custom.outputs"),
    "a negative number": (custom(outputs=-1), "stage_params[0].custom.outputs"),
    "too many outputs": (custom(outputs=1e9), "stage_params[0].custom.outputs"),
    "a negative time": (custom(first_ms=-0.5), "stage_params[0].custom.first_ms"),
    "no time": (custom(interval_ms=None), "stage_params[0].custom.interval_ms"),
    "NaN": (custom(first_ms=math.nan), "stage_params[0].custom.first_ms"),
    "infinity": (custom(first_ms=math.inf), "stage_params[0].custom.first_ms"),
    "a word for a flag": (custom(prepare_fail="false"), "stage_params[0].custom.prepare_fail"),
    "a number for a flag": (custom(prepare_fail=1), "stage_params[0].custom.prepare_fail"),
    # Outputs.
    "output of no kind": ({"output_modalities": [0]}, "output_modalities[0]"),
    "unknown output": ({"output_modalities": [TEXT, 99]}, "output_modalities[1]"),
    "an output that echo lacks": ({"output_modalities": [4]}, "output_modalities[0]"),
    "repeated output": ({"output_modalities": [TEXT, 2, TEXT]}, "output_modalities[2]"),
    # The rest.
    "long id": ({"request_id": "x" * 257}, "request_id"),
    "a time before 1970": ({"arrival_time": {"seconds": -1}}, "arrival_time"),
    "a time with too many nanos": ({"arrival_time": {"nanos": 10**9}}, "arrival_time"),
    "a time after 9999": ({"arrival_time": {"seconds": 1 << 60}}, "arrival_time"),
    "no tokens kept": (
        {"tokenization": {"truncate_prompt_tokens": 0}},
        "tokenization.truncate_prompt_tokens",
    ),
    "NaN in free data": (
        {"additional_information": {"a": {"b": [1, math.nan]}}},
        "additional_information.a.b[1]",
    ),
}


@pytest.mark.parametrize("name", INVALID)
async def test_invalid(stub: Any, name: str) -> None:
    fields, path = INVALID[name]
    responses, error = await broken_off(stub, **fields)
    assert responses == []
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD"), error
    assert list(error.violations) == [path]
    assert error.violations[path] and path in error.message
    assert error.retry is None and error.pushback_ms is None


NOT_SUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "media for a text pipeline": ({"prompt": {"media": [PNG]}}, "prompt.media[0]"),
    "media beside text": ({"prompt": {"text": "x", "media": [PNG]}}, "prompt.media[0]"),
    "media in a message": (
        message(parts=[{"text": "look"}, {"media": PNG}]),
        "prompt.messages.messages[0].parts[1].media",
    ),
    "embeddings": ({"prompt": {"embeds": EMBEDS}}, "prompt.embeds"),
    "a negative prompt": ({"prompt": {"text": "x", "negative_text": ""}}, "prompt.negative_text"),
    "priority": ({"priority": 0}, "priority"),
    "rank": ({"data_parallel_rank": 0}, "data_parallel_rank"),
    "thinking": ({"reasoning_ended": False}, "reasoning_ended"),
    "tokenization": ({"tokenization": {}}, "tokenization"),
    "salt": ({"cache_salt": ""}, "cache_salt"),
}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
async def test_not_supported(stub: Any, name: str) -> None:
    """What the pipeline cannot honour is refused, never ignored; 0, false and "" count as set."""
    fields, path = NOT_SUPPORTED[name]
    responses, error = await broken_off(stub, **fields)
    assert responses == []
    assert (error.code, error.reason) == (S.FAILED_PRECONDITION, "NOT_SUPPORTED"), error
    assert list(error.violations) == [path]


async def test_the_server_serves_after_all_of_them(stub: Any) -> None:
    for fields, _ in (INVALID | NOT_SUPPORTED).values():
        await broken_off(stub, **fields)
    assert (await collect(stub))[-1].HasField("finished")


async def test_nesting_is_taken_up_to_a_depth(stub: Any) -> None:
    assert (await collect(stub, **deep(30)))[-1].HasField("finished")
    _, error = await broken_off(stub, **deep(33))
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert next(iter(error.violations)).startswith("additional_information.k.k")


async def test_a_shape_of_many_huge_axes(stub: Any) -> None:
    """The number of bytes that it asks for has thousands of digits."""
    tensor = EMBEDS | {"shape": [1 << 62] * 1000}
    _, error = await broken_off(stub, prompt={"embeds": tensor})
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD"), error


def test_a_shape_does_not_hold_up_the_server() -> None:
    begin = time.perf_counter()
    with pytest.raises(InvalidField):
        decode_tensor(
            common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[1 << 62] * 20_000), "t"
        )
    assert time.perf_counter() - begin < 0.5


@pytest.mark.parametrize(
    ("ids", "path"),
    [([], "request_ids"), (["x"] * 1001, "request_ids"), (["x", ""], "request_ids[1]")],
)
async def test_abort_refuses(stub: Any, ids: list[str], path: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Abort(service_pb2.AbortRequest(request_ids=ids))
    error = rich_error(caught.value)
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert list(error.violations) == [path]


def test_abort_takes_1000_ids() -> None:
    ids = [str(n) for n in range(1000)]
    assert decode_abort(service_pb2.AbortRequest(request_ids=ids)) == ids


# ---------------------------------------------------------------- parameters of real engines

SAMPLING: list[tuple[str, Any, str]] = [
    ("n", 0, "n"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("presence_penalty", math.nan, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("temperature", -1, "temperature"),
    ("temperature", math.nan, "temperature"),
    ("temperature", math.inf, "temperature"),
    ("temperature", -math.inf, "temperature"),
    ("top_p", 2, "top_p"),
    ("top_p", 0, "top_p"),
    ("top_p", math.nan, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", 1.5, "min_p"),
    ("min_p", -0.1, "min_p"),
    ("seed", U64, "seed"),
    ("seed", 1 << 63, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("logprobs", -2, "logprobs"),
    ("prompt_logprobs", -2, "prompt_logprobs"),
    ("stream_interval", 0, "stream_interval"),
    ("thinking_token_budget", -2, "thinking_token_budget"),
    ("stop", ["a", ""], "stop[1]"),
    ("bad_words", [""], "bad_words[0]"),
    ("logit_bias", [{"token_id": 1, "bias": 101}], "logit_bias[0].bias"),
    ("logit_bias", [{"token_id": 1, "bias": math.nan}], "logit_bias[0].bias"),
    ("logit_bias", [{"token_id": 1}, {"token_id": 1}], "logit_bias[1].token_id"),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"json_schema": ""}, "structured_outputs.json_schema"),
    ("structured_outputs", {"json_object": False}, "structured_outputs.json_object"),
    ("structured_outputs", {"choice": {}}, "structured_outputs.choice.options"),
    ("structured_outputs", {"choice": {"options": ["a", ""]}}, "structured_outputs.choice.options"),
    ("repetition_detection", {"min_pattern_size": 1}, "repetition_detection.min_pattern_size"),
    (
        "repetition_detection",
        {"max_pattern_size": 4, "min_count": 1},
        "repetition_detection.min_count",
    ),
    ("extra_args", {"x": {"y": math.inf}}, "extra_args.x.y"),
]


@pytest.mark.parametrize(("field", "value", "path"), SAMPLING)
def test_sampling_out_of_range(field: str, value: Any, path: str) -> None:
    request = ask(stage_params=[script("audio"), {"stage": "text", "sampling": {field: value}}])
    with pytest.raises(InvalidField) as caught:
        decode_request(request, {}, None)
    assert [v.field for v in caught.value.violations] == [f"stage_params[1].sampling.{path}"]


def test_min_tokens_above_max_tokens() -> None:
    request = ask(**params("sampling", min_tokens=5, max_tokens=4))
    with pytest.raises(InvalidField) as caught:
        decode_request(request, {}, None)
    assert caught.value.violations[0].field == "stage_params[0].sampling.min_tokens"


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("diffusion", "steps", 0),
        ("diffusion", "guidance_scale", 0.5),
        ("diffusion", "guidance_scale", math.nan),
        ("diffusion", "width", 0),
        ("diffusion", "height", 0),
        ("diffusion", "frames", 0),
        ("diffusion", "fps", 0),
        ("diffusion", "fps", math.inf),
        ("codec", "speed", 0),
        ("codec", "speed", 4.5),
        ("codec", "speed", math.nan),
    ],
)
def test_other_parameters_out_of_range(kind: str, field: str, value: float) -> None:
    with pytest.raises(InvalidField) as caught:
        decode_request(ask(**params(kind, **{field: value})), {}, None)
    assert caught.value.violations[0].field == f"stage_params[0].{kind}.{field}"


def test_zero_false_and_empty_are_honoured() -> None:
    """What is set to a default-like value is set; what isn't stays None."""
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "seed": 0,
        "min_tokens": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "detokenize": False,
        "skip_special_tokens": False,
        "thinking_token_budget": 0,
        "watermarking": False,
    }
    decoded = decode_request(ask(**params("sampling", **values)), {}, None)
    assert decoded.stage_params[0].params == SamplingParams(**values)
    unset = decode_request(ask(**params("sampling")), {}, None)
    assert unset.stage_params[0].params == SamplingParams()


def test_every_scalar_of_parameters_is_optional() -> None:
    for kind in (params_pb2.SamplingParams, params_pb2.DiffusionParams, params_pb2.CodecParams):
        for field in kind.DESCRIPTOR.fields:
            if field.message_type is None and not field.is_repeated:
                assert field.has_presence, field.full_name


def test_every_sampling_field_is_decoded() -> None:
    """No field of the contract is dropped on the way."""
    names = {field.name for field in params_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == set(SamplingParams.__struct_fields__)


# ---------------------------------------------------------------- what a pipeline fixes

CHAT = """
name: chat
stages:
  - name: talk
    engine: vllm
    model: none
    output: text
    defaults: {temperature: 0.7, max_tokens: 10}
    constraints: {detokenize: true, stop_token_ids: [7], skip_special_tokens: false}
  - {name: speak, engine: codec, model: none, inputs: [talk], output: audio}
"""


@pytest.fixture
async def chat() -> Any:
    """A server of real engines that is never started: what is refused, is before."""
    config: PipelineConfig = pipeline(CHAT)
    server = Server(ServerConfig(port=0), [config])
    yield server
    await server.stop(drain_timeout=0)


def plan(server: Server, **fields: Any) -> Any:
    """The plan of a request."""
    return server.engine.plan(decode_request(ask(**fields), {}, None))


async def test_a_conflict_with_a_constraint(chat: Server) -> None:
    for field, value in (("detokenize", False), ("skip_special_tokens", True)):
        with pytest.raises(InvalidField) as caught:
            plan(chat, **params("sampling", "talk", **{field: value}))
        assert caught.value.violations[0].field == f"stage_params[0].sampling.{field}"


async def test_constraints_fill_and_add(chat: Server) -> None:
    asked = {"stop_token_ids": [3], "temperature": 0.0, "detokenize": True}
    merged = plan(chat, **params("sampling", "talk", **asked)).params["talk"]
    assert merged == SamplingParams(
        temperature=0.0,
        max_tokens=10,
        detokenize=True,
        skip_special_tokens=False,
        stop_token_ids=(3, 7),
    )


async def test_several_answers_only_where_nobody_takes_one(chat: Server) -> None:
    several = params("sampling", "talk", n=2)
    with pytest.raises(InvalidField) as caught:
        plan(chat, **several)
    assert caught.value.violations[0].field == "stage_params[0].sampling.n"
    assert plan(chat, **several, output_modalities=[TEXT]).params["talk"].n == 2


async def test_the_wrong_kind_for_a_real_engine(chat: Server) -> None:
    for kind in ("codec", "diffusion", "custom"):
        with pytest.raises(InvalidField) as caught:
            plan(chat, **params(kind, "talk"))
        assert caught.value.violations[0].field == f"stage_params[0].{kind}"


def test_prompts_decode_to_what_they_hold() -> None:
    prompt = prompt_pb2.Prompt(text="x", media=[PNG | {"mime_type": "image/png", "uuid": "u"}])
    decoded = decode_request(ask(prompt=prompt), {"traceparent": "t"}, 3.0)
    assert decoded.prompt.media[0].data == b"\x89PNG"
    assert (decoded.prompt.media[0].mime_type, decoded.prompt.media[0].uuid) == ("image/png", "u")
    assert decoded.options.trace_headers == {"traceparent": "t"}
    assert decoded.timeout_s == 3.0
