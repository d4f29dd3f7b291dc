"""Our sampling parameters as vLLM's, and vLLM's refusals as ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, NotSupported, OmniError, PromptTooLong, Violation

_TOO_LONG = ("input_text", "input_tokens", "prompt_tokens")
"""What vLLM calls the parameter that is wrong when a prompt is too long."""
_FORMS = ("json_schema", "regex", "grammar", "choice", "json_object", "structural_tag")
_FORM_SETTINGS = ("disable_any_whitespace", "disable_additional_properties")
_OF_FORMS = re.compile(r"gramma|regex|schema|choice|structur|json|xgrammar|llguidance", re.I)
"""What vLLM's refusals of a form have in common; none of them names the parameter."""
MAX_REASON = 400
"""Most characters of vLLM's own words that go to a client: a status is small."""


class OwnParams(SamplingParams):  # type: ignore[misc]
    """Parameters of one request alone: vLLM copies those that it is given, deeply, in case that
    others have them too."""

    def clone(self) -> OwnParams:
        """Itself."""
        return self


def sampling_params(
    asked: t.SamplingParams, defaults: Mapping[str, Any], *, room: int
) -> SamplingParams:
    """vLLM's SamplingParams: what is asked, else the model's own defaults; `max_tokens` unset is
    `room`.

    Raises InvalidField for what this vLLM does not have, and what vLLM itself raises for values it
    refuses."""
    values: dict[str, Any] = {"max_tokens": room, **defaults}
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is None:
            continue
        if name not in SamplingParams.__struct_fields__:
            raise InvalidField(f"params.{name}", "is not known to this version of vLLM")
        values[name] = _to_vllm(value)
    least, most = values.get("min_tokens", 0), values["max_tokens"]
    if least > most:
        raise InvalidField("params.min_tokens", f"must be at most max_tokens, here {most}")
    return OwnParams(output_kind=RequestOutputKind.DELTA, **values)


def _to_vllm(value: Any) -> Any:
    match value:
        case t.StructuredOutputs():
            given = {n: getattr(value, n) for n in value.__struct_fields__}
            given["json"] = given.pop("json_schema")
            choice = given["choice"]
            given["choice"] = list(choice) if choice is not None else None
            return StructuredOutputsParams(**{n: v for n, v in given.items() if v is not None})
        case t.RepetitionDetection():
            return RepetitionDetectionParams(
                value.max_pattern_size, value.min_pattern_size, value.min_count
            )
        case tuple():
            return list(value)
    return value


def check_form(form: t.StructuredOutputs, engine: Any) -> None:
    """Refuses settings of a form that vLLM takes and then ignores: they are the engine's, set in
    its `structured_outputs_config` (here `engine`). Raises InvalidField."""
    for name in _FORM_SETTINGS:
        value = getattr(form, name)
        here = bool(getattr(engine, name, False))
        if value is not None and value != here:
            raise InvalidField(
                f"params.structured_outputs.{name}", f"is set for the whole stage, to {here}"
            )
    if form.whitespace_pattern is not None:
        raise InvalidField(
            "params.structured_outputs.whitespace_pattern", "cannot be honoured by this stage"
        )


def refusal(error: Exception, place: str, asked: t.SamplingParams | None = None) -> OmniError:
    """vLLM's refusal as ours: too long a prompt, a parameter of `asked`, or else `place` as a
    whole."""
    parameter = getattr(error, "parameter", None)
    text = str(error.args[0])[:MAX_REASON] if error.args else "vLLM refused it"
    if parameter in _TOO_LONG:
        return PromptTooLong(text)
    if parameter == "truncate_prompt_tokens":
        return InvalidField("tokenization.truncate_prompt_tokens", text)
    return InvalidField(_path(parameter, text, asked) or place, text)


def _path(parameter: object, text: str, asked: t.SamplingParams | None) -> str | None:
    """Where the fault is, as far as vLLM says so."""
    if asked is None:
        return None
    if parameter in asked.__struct_fields__:
        return f"params.{parameter}"
    if asked.structured_outputs is not None and _OF_FORMS.search(text):
        return form_path(asked.structured_outputs)
    # Some of vLLM's checks name the parameter in their text only.
    given = (n for n in asked.__struct_fields__ if getattr(asked, n) is not None)
    named = next((n for n in given if re.search(rf"\b{n}\b", text)), None)
    return f"params.{named}" if named else None


def form_path(form: t.StructuredOutputs) -> str:
    """Where the form itself is: its kind."""
    kind = next(name for name in _FORMS if getattr(form, name) is not None)
    return f"params.structured_outputs.{kind}"


def unsupported(field: str, description: str) -> NotSupported:
    """The refusal of what the stage could only ignore."""
    return NotSupported(f"{field}: {description}", violations=(Violation(field, description),))
