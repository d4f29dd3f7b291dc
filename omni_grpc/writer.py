"""The writer of one stream: how long its reader may leave a message unread."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Protocol

from omni_grpc.errors import SlowConsumer


class Sink(Protocol):
    """Where messages go: a call's context."""

    async def write(self, message: Any) -> None:
        """Returns when the transport has taken the message."""


class Writer:
    """Writes a stream's messages, in a `with`, from one task. A message that waits longer than
    `limit_s` ends the `with` with SlowConsumer.

    One timer watches over all messages: one for each would cost more than all else that is done
    for it. So it may be late by a quarter of the limit, never early."""

    def __init__(self, sink: Sink, limit_s: float) -> None:
        self._sink = sink
        self._limit = limit_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        """Since when a message waits."""
        self._late = False

    async def write(self, message: Any) -> None:
        """Returns when the reader has room for more."""
        self._since = self._loop.time()
        await self._sink.write(message)
        self._since = None

    def __enter__(self) -> Writer:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancels = task, task.cancelling()
        self._look_in(self._limit)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        # Ours, and not also somebody else's.
        if self._late and self._task.uncancel() <= self._cancels and kind is asyncio.CancelledError:
            raise SlowConsumer(f"an output waited {self._limit:g} s to be read") from None

    def _look_in(self, delay: float) -> None:
        self._timer = self._loop.call_later(delay, self._look)

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._limit:
            self._late = True
            self._task.cancel()
        else:
            self._look_in(self._limit - waited if waited else self._limit / 4)
