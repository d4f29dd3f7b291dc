"""Keeping the pace of a film that is watched while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Pace:
    """When chunks of `chunk_s` seconds may be made and must be ready.

    The viewer plays chunk 0 from when it is ready, and each one after the one before. Chunk n is
    begun at most `buffer_chunks` chunks before it is due. One that is ready too late is an
    underrun: the viewer has waited, and all that follows is due later by as much. Time for which
    the consumer holds a chunk back delays what follows too, but is nobody's underrun."""

    def __init__(
        self,
        chunk_s: float,
        buffer_chunks: int,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.underruns = 0
        self._chunk_s = chunk_s
        self._buffer = buffer_chunks
        self._clock = clock
        self._sleep = sleep
        self._zero: float | None = None
        """When chunk 0 would have begun to play, had nothing been late since."""

    async def turn(self, chunk: int) -> None:
        """Returns when `chunk` may be begun."""
        if self._zero is None:
            return
        wait = self._zero + (chunk - self._buffer) * self._chunk_s - self._clock()
        if wait > 0:
            await self._sleep(wait)

    def ready(self, chunk: int) -> bool:
        """`chunk` is made; whether that is an underrun."""
        began = self._zero is not None
        underrun = self._delayed(chunk) and began
        self.underruns += underrun
        return underrun

    def taken(self, chunk: int) -> None:
        """The consumer has taken `chunk`."""
        self._delayed(chunk)

    def _delayed(self, chunk: int) -> bool:
        zero = self._clock() - chunk * self._chunk_s
        late = self._zero is None or zero > self._zero
        if late:
            self._zero = zero
        return late
