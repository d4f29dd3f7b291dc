"""What a client feeds a resumable request, on its way to stage 0: the sink of its lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from omni_grpc.artifacts import Artifacts
from omni_grpc.conversation import Conversation
from omni_grpc.errors import OmniError
from omni_grpc.graph import Graph
from omni_grpc.lane import Chunk, Lane
from omni_grpc.plan import Plan
from omni_grpc.stage_run import StageRun
from omni_grpc.submission import Submission
from omni_grpc.types import Prompt, TextDelta


class Feeding:
    """One request's input: its lane, and what the chunk that is under way brought with it."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        submission: Submission,
        artifacts: Artifacts,
        close: Callable[[OmniError | None], None],
        on_activity: Callable[[], None],
    ) -> None:
        self.lane = Lane(self, on_activity)
        self._plan = plan
        self._graph = graph
        self._submission = submission
        self._artifacts = artifacts
        self._close = close
        self._chunk: Chunk | None = None
        self._brought: Artifacts | None = None
        """Artifact directories of the chunk that is under way."""

    async def begin(self, prompt: Prompt) -> None:
        """The prompt that the request itself brought, if there is something in it. Raises what
        refuses it."""
        if not self._plan.request.prompt.empty:
            await self.lane.begin(prompt)

    def close(self, error: OmniError | None) -> None:
        """Ends the request."""
        self._close(error)

    async def viewed(self, chunk: Chunk) -> Chunk:
        """A client's chunk with its prompt as stage 0 sees it."""
        if chunk.prompt is None:
            return chunk
        artifacts = self._artifacts.part()
        request_id = self._plan.request.request_id
        try:
            prompt, _ = await self._submission.view(chunk.prompt, request_id, artifacts)
        except BaseException:
            artifacts.delete()
            raise
        self._brought = artifacts
        return replace(chunk, prompt=prompt)

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        """Sends a client's chunk to stage 0."""
        self._chunk = chunk
        self._graph.entry.feed(
            chunk.payload,
            prompt=chunk.prompt,
            params=chunk.params.get(self._graph.entry.node.name),
            end_of_segment=chunk.end_of_segment,
            end=end,
            number=number,
        )

    def answered(self, stage: StageRun, number: int, error: OmniError | None) -> None:
        """Stage 0's word on a client's chunk; a refusal gets the client's own paths."""
        chunk = self._chunk
        if error is not None:
            error = self._placed(stage, error, chunk)
        elif chunk is not None:
            self.note_params(chunk)
            if stage.memory is not None:
                remember(stage.memory, chunk)
        brought, self._brought = self._brought, None
        if brought is not None:
            brought.keep() if error is None else brought.delete()
        self.lane.answered(number, error)

    def _placed(self, stage: StageRun, error: OmniError, chunk: Chunk | None) -> OmniError:
        if chunk is None or chunk.seq < 0:
            return self._plan.placed(stage.node.name, error)
        return self._plan.placed(stage.node.name, error, chunk.paths, "chunk.")

    def note_params(self, chunk: Chunk) -> None:
        """Keeps a segment's own parameters for the stages that will come to it later. Only now: a
        chunk that is refused leaves none."""
        for name, params in chunk.params.items():
            stage = self._graph.get(name)
            if stage is not None and stage is not self._graph.entry:
                stage.segment_params[self.lane.segments] = params

    def repeat(self, *, anew: bool) -> None:
        """The stages begin anew with the segment that is open: its parameters, and where stage 0
        itself is `anew` its chunks too."""
        entry = self._graph.entry
        for chunk in self.lane.open_chunks:
            self.note_params(chunk)
            if anew:
                params = chunk.params.get(entry.node.name)
                entry.feed(chunk.payload, prompt=chunk.prompt, params=params)
        if anew:
            self.lane.resend()


def remember(memory: Conversation, chunk: Chunk) -> None:
    """Adds a client's chunk to what a conversation was asked."""
    if chunk.prompt is not None:
        memory.ask(chunk.prompt)
    if isinstance(chunk.payload, TextDelta):
        memory.ask_text(chunk.payload.text)
    if chunk.end_of_segment:
        memory.asked()
