"""Plain requests' tokens from the engine core's message straight to the replica's line.

What vLLM does between the two for each token (an output object, a queue, a task that is woken,
generators to hand it through) costs several times what a token needs: to be detokenized. So text
between a request's first and last output leaves in the turn in which it came. The first output and
the last, and all outputs of requests that want more than text, take vLLM's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind

Say = Callable[[str, list[int]], None]


class Line:
    """One request's short cut."""

    __slots__ = ("collector", "detokenizer", "say", "state", "tokens")

    def __init__(self, state: Any, say: Say) -> None:
        self.state = state
        self.detokenizer = state.detokenizer
        self.collector = state.queue
        self.say = say
        self.tokens = 0
        """How many went this way."""

    def take(self, output: Any) -> bool:
        """Says an output's text, unless it is for vLLM: the first one, and the last one too, and
        one that would overtake what its task has not fetched yet."""
        if output.finish_reason is not None or self.state.is_prefilling:
            return False
        if self.collector.output is not None:
            return False
        token_ids = output.new_token_ids
        self.detokenizer.update(token_ids, False)
        self.tokens += len(token_ids)
        self.say(self.detokenizer.get_next_output_text(False, True), token_ids)
        return True


class ShortCut:
    """The short cuts of one engine: stands in front of its output processor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._process = processor.process_outputs
        self._lines: dict[str, Line] = {}
        processor.process_outputs = self._outputs

    def open(self, request_id: str, say: Say) -> Line | None:
        """A short cut for a request, by its id in the engine, if it is plain."""
        state = self._processor.request_states.get(request_id)
        if state is None or not plain(state):
            return None
        line = self._lines[request_id] = Line(state, say)
        return line

    def close(self, request_id: str) -> None:
        """The request is over."""
        self._lines.pop(request_id, None)

    def _outputs(self, outputs: list[Any], *arguments: Any, **options: Any) -> Any:
        lines = self._lines
        others = []
        for output in outputs:
            line = lines.get(output.request_id)
            if line is None or not line.take(output):
                others.append(output)
        return self._process(others, *arguments, **options)


def plain(state: Any) -> bool:
    """Whether a request wants text and tokens and nothing else, piece by piece, of one answer."""
    logprobs = state.logprobs_processor
    return (
        state.queue is not None
        and state.parent_req is None
        and not state.streaming_input
        and state.output_kind is RequestOutputKind.DELTA
        and state.stream_interval == 1
        and state.detokenizer is not None
        # vLLM ends an answer at a stop string, and trims it.
        and not getattr(state.detokenizer, "stop", None)
        and logprobs is not None
        and logprobs.num_logprobs is None
        and logprobs.num_prompt_logprobs is None
    )
