"""Every sampling parameter, from the contract's message to vLLM's own object."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import asdict

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, PromptTooLong
from omni_grpc.v1 import params_pb2
from omni_grpc.wire.params import decode_stage_params

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # vLLM's import alone takes ten seconds

ROOM = 777

SET: dict[str, Any] = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "seed": 2**63 - 1,
    "stop": ["end", "Ende"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "max_tokens": 12,
    "min_tokens": 4,
    "logprobs": 2,
    "prompt_logprobs": 3,
    "logprob_token_ids": [1, 2],
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "stream_interval": 9,
    "structured_outputs": {"regex": "[a-z]+"},
    "logit_bias": [{"token_id": 4, "bias": -1.5}],
    "allowed_token_ids": [8, 9],
    "bad_words": ["bad"],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 11,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    "watermarking": False,
    "extra_args": {"knob": "up"},
}
"""A value for each field that no default has."""

ZEROS: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": False,
    "skip_reading_prefix_cache": False,
    "thinking_token_budget": 0,
    "watermarking": False,
}

MODEL_DEFAULTS: dict[str, Any] = {
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "temperature": 0.6,
    "top_k": 50,
    "min_p": 0.1,
    "ignore_eos": True,
}
"""What a model's generation_config.json may say."""

NOT_A_CLIENTS = {
    "output_kind": "always deltas",
    "flat_logprobs": "a form of vLLM's own results",
    "skip_clone": "vLLM's own",
    "output_text_buffer_length": "vLLM's own",
    "prompt_logprob_token_ids": "not to be had with streams, nor on the CPU",
    "prompt_logprob_start": "goes with prompt_logprob_token_ids",
    "routed_experts_prompt_start": "for results that this contract does not carry",
    "trace_decode_token_ids": "for debugging an engine",
}


@pytest.fixture(scope="module")
def made() -> Callable[..., Any]:
    """`made(message fields, defaults)` is vLLM's object of a message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from omni_grpc.stages.vllm.params import sampling_params

    def make(fields: dict[str, Any], defaults: dict[str, Any] | None = None) -> Any:
        return sampling_params(decoded(fields), defaults or {}, room=ROOM)

    return make


def decoded(fields: dict[str, Any]) -> t.SamplingParams:
    """The fields of a message `SamplingParams`, as our type."""
    fields = dict(fields)
    extra = fields.pop("extra_args", None)
    message = params_pb2.StageParams(stage="s", sampling=params_pb2.SamplingParams(**fields))
    if extra is not None:
        message.sampling.extra_args.update(extra)
    params = decode_stage_params(message, "stage_params[0]").params
    assert isinstance(params, t.SamplingParams)
    return params


def seen(made: Any, name: str) -> Any:
    """A field of vLLM's object in the form of the message."""
    value = getattr(made, name)
    match name, value:
        case "structured_outputs", form if form is not None:
            return {"regex": form.regex}
        case "repetition_detection", found if found is not None:
            return vars(found)
        case "logit_bias", biases if biases is not None:
            return [{"token_id": token, "bias": bias} for token, bias in biases.items()]
    return value


def test_the_contract_has_every_field_that_a_client_may_set(made: Callable[..., Any]) -> None:
    vllms = {n for n in made({}).__struct_fields__ if not n.startswith("_")}
    ours = set(t.SamplingParams.__struct_fields__)
    assert ours == set(params_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert ours == set(SET), "a field without a value here is not tested"
    assert ours <= vllms
    assert vllms - ours == set(NOT_A_CLIENTS)


def test_unset_fields_are_vllms_defaults_and_the_room_left(made: Callable[..., Any]) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    plain = SamplingParams(max_tokens=ROOM, output_kind=RequestOutputKind.DELTA)
    defaults = SamplingParams(
        max_tokens=ROOM, output_kind=RequestOutputKind.DELTA, **MODEL_DEFAULTS
    )
    # Field by field: ours are of a class of their own.
    assert asdict(made({})) == asdict(plain)
    assert asdict(made({}, MODEL_DEFAULTS)) == asdict(defaults)


@pytest.mark.parametrize("name", SET)
def test_a_set_field_reaches_vllm_and_changes_no_other(made: Callable[..., Any], name: str) -> None:
    plain, found = made({}), made({name: SET[name]})
    assert seen(found, name) == SET[name]
    # What follows from a field inside of vLLM itself.
    derived = {
        "stop": {"output_text_buffer_length"},
        "prompt_logprobs": {"skip_reading_prefix_cache"},
    }
    for other in t.SamplingParams.__struct_fields__:
        if other != name and other not in derived.get(name, ()):
            assert seen(found, other) == seen(plain, other), other


@pytest.mark.parametrize("name", ZEROS)
def test_zero_and_false_are_honoured_over_the_models_own_default(
    made: Callable[..., Any], name: str
) -> None:
    found = made({name: ZEROS[name]}, MODEL_DEFAULTS)
    assert seen(found, name) == ZEROS[name]
    assert type(seen(found, name)) is type(ZEROS[name])


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": '{"type": "object"}'},
        {"regex": "a+"},
        {"grammar": 'root ::= "a"'},
        {"choice": {"options": ["a", "b"]}},
        {"json_object": True},
        {"structural_tag": '{"type": "structural_tag"}'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_each_form_of_an_answer_reaches_vllm(
    made: Callable[..., Any], form: dict[str, Any]
) -> None:
    ((name, value),) = form.items()
    found = made({"structured_outputs": form}).structured_outputs
    theirs = {"json_schema": "json"}.get(name, name)
    assert getattr(found, theirs) == (value["options"] if name == "choice" else value)


@pytest.mark.parametrize(
    "form", [{"regex": "a" * 65537}, {"choice": {"options": ["a" * 40000, "b" * 40000]}}]
)
def test_a_form_has_a_largest_size(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        decoded({"structured_outputs": form})
    (kind,) = form
    path = f"stage_params[0].sampling.structured_outputs.{kind}"
    assert [v.field for v in caught.value.violations] == [path]


def test_what_this_vllm_does_not_know_is_refused(made: Callable[..., Any]) -> None:
    from omni_grpc.stages.vllm.params import sampling_params

    class Later(t.SamplingParams, frozen=True, tag="later"):
        from_the_future: int | None = None

    assert sampling_params(Later(), {}, room=1).max_tokens == 1
    with pytest.raises(InvalidField) as caught:
        sampling_params(Later(from_the_future=0), {}, room=1)
    assert [v.field for v in caught.value.violations] == ["params.from_the_future"]


def test_at_least_as_many_tokens_as_there_is_room_for_are_refused(
    made: Callable[..., Any],
) -> None:
    with pytest.raises(InvalidField) as caught:
        made({"min_tokens": ROOM + 1})
    assert [v.field for v in caught.value.violations] == ["params.min_tokens"]


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("disable_any_whitespace", True, True),
        ("disable_any_whitespace", False, False),
        ("disable_additional_properties", True, True),
        ("whitespace_pattern", " ?", True),
    ],
)
def test_settings_of_a_form_that_vllm_would_ignore_are_refused(
    made: Callable[..., Any], name: str, value: object, refused: bool
) -> None:
    from omni_grpc.stages.vllm.params import check_form

    engine = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    form = decoded({"structured_outputs": {"regex": "a", name: value}}).structured_outputs
    assert form is not None
    if not refused:
        check_form(form, engine)
        return
    with pytest.raises(InvalidField) as caught:
        check_form(form, engine)
    assert [v.field for v in caught.value.violations] == [f"params.structured_outputs.{name}"]


@pytest.mark.parametrize(
    ("text", "parameter", "asked", "path"),
    [
        ("seed must not be odd", None, {"seed": 1, "n": 1}, "params.seed"),
        ("too many: 30", "logprobs", {"logprobs": 30, "seed": 1}, "params.logprobs"),
        ("Invalid grammar specification.", None, {"structured_outputs": {"grammar": "x"}},
         "params.structured_outputs.grammar"),
        ("nothing that is known", None, {"seed": 1}, "params"),
        ("it would split an item", "truncate_prompt_tokens", {},
         "tokenization.truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_refusal_of_vllm_names_the_field(
    made: Callable[..., Any], text: str, parameter: str | None, asked: dict[str, Any], path: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    from omni_grpc.stages.vllm.params import refusal

    error = refusal(VLLMValidationError(text, parameter=parameter), "params", decoded(asked))
    assert isinstance(error, InvalidField)
    assert [v.field for v in error.violations] == [path]
    too_long = refusal(VLLMValidationError("x" * 9000, parameter="input_tokens"), "prompt")
    assert isinstance(too_long, PromptTooLong)
    assert len(too_long.message) < 1000
