"""What the engine gives, as ours: deltas of text with their tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from omni_grpc import types as t

_REASONS = {
    "stop": t.FinishReason.STOP,
    "length": t.FinishReason.LENGTH,
    "repetition": t.FinishReason.REPETITION,
}


class EngineGaveUp(RuntimeError):  # noqa: N818 - named after its cause, as all errors are
    """The engine ended a request that was neither done nor aborted by us."""


def stage_outputs(output: RequestOutput, *, prompt_too: bool) -> list[t.StageOutput]:
    """One delta per answer that has something new. `prompt_too`: with the log-probabilities of the
    prompt, which each of several answers brings again."""
    given = _prompt_logprobs(output) if prompt_too else []
    deltas = [_delta(completion) for completion in output.outputs]
    if given and deltas:
        first = deltas[0]
        text = first.payload
        assert isinstance(text, t.TextDelta)
        whole = t.TextDelta(text.text, text.token_ids, text.logprobs, given)
        deltas[0] = t.StageOutput(whole, index=first.index, finish=first.finish)
    return deltas


def _delta(completion: CompletionOutput) -> t.StageOutput:
    finish = None
    if completion.finish_reason is not None:
        reason = _REASONS.get(completion.finish_reason)
        if reason is None:
            # "abort" and "error"
            raise EngineGaveUp(f"the engine ended a request with {completion.finish_reason!r}")
        finish = t.Finish(reason, completion.stop_reason)
    delta = t.TextDelta(
        completion.text,
        list(completion.token_ids),
        _logprobs(completion.token_ids, completion.logprobs),
    )
    return t.StageOutput(delta, index=completion.index, finish=finish)


def _logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]] | None
) -> list[t.TokenLogprobs]:
    if not entries:
        return []
    return [_entry(token, found) for token, found in zip(token_ids, entries, strict=True)]


def _prompt_logprobs(output: RequestOutput) -> list[t.TokenLogprobs]:
    if not output.prompt_logprobs or not output.prompt_token_ids:
        return []
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    # Nothing comes before the first token: it has none.
    return [_entry(token, found or {}) for token, found in pairs]


def _entry(token: int, found: Mapping[int, Any]) -> t.TokenLogprobs:
    candidates = tuple(
        t.CandidateLogprob(i, c.logprob, c.rank or 0, c.decoded_token or "")
        for i, c in found.items()
    )
    own = found.get(token)
    if own is None:
        return t.TokenLogprobs(token, 0.0, 0, candidates)
    return t.TokenLogprobs(token, own.logprob, own.rank or 0, candidates)
