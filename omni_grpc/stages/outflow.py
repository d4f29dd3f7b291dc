"""What a replica's tasks say, on its way to the server.

Plain text, which nearly everything is, leaves in columns: one message for all that was said in one
turn of the loop. Within a merge window (`Pace`) a task's text waits for more of its own to join it,
so that whatever is done for a message is done once for several tokens. The first text of an answer
never waits, and nothing else does."""

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
        self._tasks: list[int] = []
        self._texts: list[str] = []
        self._token_ids: list[list[int]] = []
        """What was said in this turn."""
        self._waiting: list[Stream] = []
        """Whose text leaves when the window ends."""
        self._timer: asyncio.TimerHandle | None = None

    def speak(self, task: int, text: str, token_ids: list[int]) -> None:
        """Sends plain text of a task: it leaves when this turn is over."""
        if not self._tasks:
            self._loop.call_soon(self.flush)
        self._tasks.append(task)
        self._texts.append(text)
        self._token_ids.append(token_ids)

    def emit(self, message: FromReplica) -> None:
        """Sends anything else, behind all that was said."""
        self.flush()
        self.send(message)

    def hold(self, stream: Stream) -> None:
        """This stream's text leaves with all else that waits now."""
        if self._timer is None:
            self._timer = self._loop.call_later(self.window, self._release)
        self._waiting.append(stream)

    def _release(self) -> None:
        self._timer = None
        streams, self._waiting = self._waiting, []
        for stream in streams:
            # What waited may have left already, in front of something else.
            if stream.waits:
                stream.leave()

    def flush(self) -> None:
        """What was said leaves now."""
        if not self._tasks:
            return
        spoken = Spoken(self._tasks, self._texts, self._token_ids)
        self._tasks, self._texts, self._token_ids = [], [], []
        self.send(spoken)


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
        "task",
        "waits",
    )

    def __init__(self, outflow: Outflow, task: int, *, joins: bool, segment: int) -> None:
        self.task = task
        self.segment = segment
        self.waits = False
        """Whether text waits for the end of a window."""
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
            self.leave()

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
        may_wait = self._joins and self._began and self._outflow.window
        if not (may_wait or self._texts or self._open is not None):
            self._began = True
            self._speak(text, token_ids)
            return
        self._texts.append(text)
        self._token_ids += token_ids
        self._characters += len(text)
        pieces = max(len(self._texts), len(self._token_ids))
        if self._characters > JOINED_CHARACTERS or pieces > JOINED_TOKENS:
            self.leave()
        elif not self.waits and self._open is None:
            self.waits = True
            self._outflow.hold(self)

    def leave(self) -> None:
        """Sends the text that waits; while the consumer is behind, it is kept."""
        self.waits = False
        if self._texts and self._open is None:
            said = self._taken()
            self._speak(said.text, said.token_ids)

    def close(self) -> None:
        """The task has said all: what waits leaves now."""
        if self._texts:
            self._emit(StageOutput(self._taken()))
        self._outflow.flush()

    def drop(self) -> None:
        """The task ended before it had said all: what waits is of no use."""
        self._texts.clear()

    def _speak(self, text: str, token_ids: list[int]) -> None:
        if self.segment:
            self._emit(StageOutput(TextDelta(text, token_ids)))
        else:
            self._count(text_size(text, token_ids))
            self._outflow.speak(self.task, text, token_ids)

    def _emit(self, output: StageOutput) -> None:
        if self.segment:
            output = msgspec.structs.replace(output, segment=self.segment)
        self._count(output_size(output))
        self._outflow.emit(Emitted(self.task, output))

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
        delta = TextDelta("".join(self._texts), self._token_ids)
        self._texts, self._token_ids, self._characters, self.waits = [], [], 0, False
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
