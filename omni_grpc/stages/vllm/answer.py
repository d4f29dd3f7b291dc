"""One request in the engine: from what it was submitted as to its last word."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from vllm.outputs import STREAM_FINISHED

from omni_grpc import types as t
from omni_grpc.errors import InvalidField
from omni_grpc.stages.vllm.load import WatchedEngine
from omni_grpc.stages.vllm.outputs import EngineGaveUp, stage_outputs
from omni_grpc.stages.vllm.params import form_path
from omni_grpc.stages.vllm.shortcut import Line


@dataclasses.dataclass(slots=True)
class Submitted:
    """A request that the engine has taken: where its outputs come, and its id in the engine."""

    collector: Any
    prompt_tokens: int
    media: bool = False
    """Whether it has media and nothing was said yet: then it may be sent a second time."""
    form: t.StructuredOutputs | None = None
    """The form that the engine has to compile before it says anything; None once it did."""
    line: Line | None = None
    """Its short cut, if it has one."""


async def answer(engine: WatchedEngine, prepared: Submitted) -> AsyncGenerator[t.StageOutput]:
    """The outputs of a request, usage last; without those that take its short cut. Left early, the
    request is aborted.

    Raises EngineGaveUp, EngineDeadError."""
    collector, generated, cached = prepared.collector, 0, 0
    finished, prompt_told = False, False
    try:
        while not finished:
            # Without an await while something is there: fewer task switches under load.
            output = collector.get_nowait() or await collector.get()
            finished = output.finished
            if output is STREAM_FINISHED:
                break
            cached = output.num_cached_tokens or cached
            generated += sum(len(completion.token_ids) for completion in output.outputs)
            if generated:
                prepared.media, prepared.form = False, None
            for delta in stage_outputs(output, prompt_too=not prompt_told):
                yield delta
            prompt_told = prompt_told or bool(output.prompt_logprobs)
    finally:
        engine.short_cut.close(collector.request_id)
        if not finished:
            await engine.abort(collector.request_id, internal=True)
        collector.close()
    if prepared.line is not None:
        generated += prepared.line.tokens
    yield t.StageOutput(usage=t.Usage(prepared.prompt_tokens, cached, generated))


def blamed(error: EngineGaveUp, prepared: Submitted) -> Exception:
    """Whose fault it is. What a form's parser takes may still be more than its compiler can do."""
    if prepared.form is None:
        return error
    return InvalidField(form_path(prepared.form), "is more than the engine can compile")
