"""What a replica's tasks say, on its way to the server.

Plain text, which nearly everything is, leaves in columns: one message for all tasks that spoke in
one turn of the loop. Within a merge window (`Pace`) a task's text waits for more of its own to join
it, so that whatever is done for a message is done once for several tokens. The first text of an
answer never waits, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from omni_grpc.ipc import (
    WINDOW_BYTES,
    Emitted,
    FromReplica,
    Spoken,
    output_size,
    text_size,
)
from omni_grpc.types import StageOutput, TextDelta

JOINED_CHARACTERS = 8 << 10
JOINED_TOKENS = 1024
"""Where joining stops, however long the window: a message stays small."""


class Outflow:
    """All tasks' ways out of one replica."""

    def __init__(self, send: Callable[[FromReplica], None]) -> None:
        self.window = 0.0
        """Seconds that text may wait."""
        self.send = send
        self._loop = asyncio.get_running_loop()
        self._speaking: list[Stream] = []
        """Whose text leaves when this turn of the loop is over."""
        self._waiting: list[Stream] = []
        """Whose text leaves when the window ends."""
        self._timer: asyncio.TimerHandle | None = None

    def speak_soon(self, stream: Stream) -> None:
        """This stream's text leaves when this turn is over."""
        if not self._speaking:
            self._loop.call_soon(self._flush_speaking)
        self._speaking.append(stream)

    def speak_later(self, stream: Stream) -> None:
        """This stream's text leaves with all else that waits now."""
        if self._timer is None:
            self._timer = self._loop.call_later(self.window, self._flush_waiting)
        self._waiting.append(stream)

    def _flush_speaking(self) -> None:
        streams, self._speaking = self._speaking, []
        self._flush(streams)

    def _flush_waiting(self) -> None:
        self._timer = None
        streams, self._waiting = self._waiting, []
        self._flush(streams)

    def _flush(self, streams: list[Stream]) -> None:
        tasks: list[int] = []
        texts: list[str] = []
        token_ids: list[list[int]] = []
        for stream in streams:
            # What was said may have left already, in front of something else.
            if stream.speaks and (said := stream.take()) is not None:
                tasks.append(stream.task)
                texts.append(said.text)
                token_ids.append(said.token_ids)
        if tasks:
            self.send(Spoken(tasks, texts, token_ids))


class Stream:
    """One task's way out: its outputs in order, and how much of them is under way.

    `joins`: its text may wait within the window. `segment` is the number of the segment that is
    being answered."""

    __slots__ = (
        "_began",
        "_characters",
        "_joins",
        "_open",
        "_outflow",
        "_outstanding",
        "_texts",
        "_token_ids",
        "segment",
        "speaks",
        "task",
    )

    def __init__(self, outflow: Outflow, task: int, *, joins: bool, segment: int) -> None:
        self.task = task
        self.segment = segment
        self.speaks = False
        """Whether text waits to leave."""
        self._outflow = outflow
        self._joins = joins
        self._began = False
        """Whether the present answer's first text has left."""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._characters = 0
        self._outstanding = 0
        self._open: asyncio.Event | None = None
        """There while so much is under way that the task waits."""

    async def room(self) -> None:
        """Returns when less than WINDOW_BYTES are under way. One output may be larger."""
        if self._open is not None:
            await self._open.wait()

    def give(self, size: int) -> None:
        """The consumer took `size` bytes."""
        self._outstanding -= size
        if self._open is not None and self._outstanding < WINDOW_BYTES:
            self._open.set()
            self._open = None
            if self._texts:
                self._outflow.speak_soon(self)
                self.speaks = True

    def put(self, output: StageOutput) -> None:
        """Adds an output. Plain text may wait for more; anything else takes it along.

        Raises TypeError at a text that is none: it must not get among the others'."""
        payload = output.payload
        if isinstance(payload, TextDelta):
            if not isinstance(payload.text, str):
                raise TypeError(f"a text is a str, not {type(payload.text).__name__}")
            if plain(output):
                self.say(payload.text, payload.token_ids)
                return
        if self._texts:
            output = self._joined(output)
        self._emit(output)
        if output.segment_end:
            self.segment += 1
            self._began = False

    def say(self, text: str, token_ids: list[int]) -> None:
        """Adds plain text. Never waits; while the consumer is behind, it is kept."""
        self._texts.append(text)
        self._token_ids += token_ids
        self._characters += len(text)
        if self._open is not None:
            return
        if (
            self._characters > JOINED_CHARACTERS
            or len(self._token_ids) > JOINED_TOKENS
            or len(self._texts) > JOINED_TOKENS
        ):
            # Now: who never lets the loop have a turn must fill the window all the same, and wait.
            self._began = True
            self._emit(StageOutput(self._taken()))
        elif not self.speaks:
            self.speaks = True
            if self._joins and self._began and self._outflow.window:
                self._outflow.speak_later(self)
            else:
                self._began = True
                self._outflow.speak_soon(self)

    def take(self) -> TextDelta | None:
        """The text that waits, in the form of columns; None where it went another way."""
        self.speaks = False
        if self._open is not None:
            # Kept until the consumer has taken something.
            return None
        delta = self._taken()
        if self.segment:
            self._emit(StageOutput(delta))
            return None
        self._count(text_size(delta.text, delta.token_ids))
        return delta

    def close(self) -> None:
        """The task has said all: what waits leaves now."""
        if self._texts:
            self._emit(StageOutput(self._taken()))

    def drop(self) -> None:
        """The task ended before it had said all: what waits is of no use."""
        self._taken()

    def _emit(self, output: StageOutput) -> None:
        if self.segment:
            output = msgspec.structs.replace(output, segment=self.segment)
        self._count(output_size(output))
        self._outflow.send(Emitted(self.task, output))

    def _joined(self, output: StageOutput) -> StageOutput:
        """The output behind the text that waits: as one where both are the same answer's."""
        said, payload = self._taken(), output.payload
        if isinstance(payload, TextDelta) and not (
            output.index or payload.logprobs or payload.prompt_logprobs
        ):
            whole = TextDelta(said.text + payload.text, said.token_ids + payload.token_ids)
            return msgspec.structs.replace(output, payload=whole)
        self._emit(StageOutput(said))
        return output

    def _taken(self) -> TextDelta:
        texts = self._texts
        delta = TextDelta("".join(texts), self._token_ids)
        self._texts, self._token_ids, self._characters, self.speaks = [], [], 0, False
        return delta

    def _count(self, size: int) -> None:
        self._outstanding += size
        if self._outstanding >= WINDOW_BYTES and self._open is None:
            self._open = asyncio.Event()


def plain(output: StageOutput) -> bool:
    """Whether an output is text of the only answer, and nothing else."""
    payload = output.payload
    return (
        type(payload) is TextDelta
        and not payload.logprobs
        and not payload.prompt_logprobs
        and not output.index
        and output.finish is None
        and output.usage is None
        and output.progress is None
        and output.event is None
        and not output.segment_end
    )
