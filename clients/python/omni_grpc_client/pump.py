"""Input that the caller writes while it is sent: any iterable, in the loop or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from typing import Generic, TypeVar

T = TypeVar("T")

READ_AHEAD = 8
"""Items that may wait for the server."""


async def pumped(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """The items. What blocks (a file, a generator of a synchronous program) runs in a thread of its
    own, a few items ahead; what it raises is raised here.

    Closing stops asking for items. One that is being waited for is not interrupted: its thread,
    which keeps no process alive, ends with it."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    if isinstance(items, list | tuple):
        for item in items:
            yield item
        return
    async with aclosing(_from_thread(iter(items))) as moved:
        async for item in moved:
            yield item


class _End:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


async def _from_thread(items: Iterator[T]) -> AsyncGenerator[T, None]:
    lane = _Lane[T](asyncio.get_running_loop())
    # A daemon: a read of a terminal cannot be interrupted, and must not keep the process alive.
    threading.Thread(target=lane.fill, args=(items,), name="omni-input", daemon=True).start()
    try:
        while not isinstance(item := await lane.queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        lane.close()


class _Lane(Generic[T]):
    """Between the thread that asks for items and the loop that takes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[T | _End] = asyncio.Queue(READ_AHEAD)
        self._loop = loop
        self._closed = False

    def fill(self, items: Iterator[T]) -> None:
        """In the thread: moves items until they end, or nobody wants them."""
        end = _End()
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # it is raised where the items are taken
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        if self._closed:
            return False
        putting = self.queue.put(item)
        try:
            asyncio.run_coroutine_threadsafe(putting, self._loop).result()
        except (RuntimeError, CancelledError):
            # The loop is closed.
            putting.close()
            return False
        return not self._closed

    def close(self) -> None:
        """In the loop: no more items."""
        self._closed = True
        with suppress(asyncio.QueueEmpty):
            # Whoever waits for room goes on, and sees it.
            while True:
                self.queue.get_nowait()


async def with_signs(
    texts: AsyncGenerator[str, None], patience: float
) -> AsyncGenerator[str, None]:
    """The texts, with "" where none came for `patience` seconds: a sign that the input goes on."""
    coming = asyncio.ensure_future(anext(texts, None))
    try:
        while True:
            done, _ = await asyncio.wait([coming], timeout=patience)
            if not done:
                yield ""
            elif (text := coming.result()) is None:
                return
            else:
                yield text
                coming = asyncio.ensure_future(anext(texts, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await texts.aclose()
