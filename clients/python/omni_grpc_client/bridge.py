"""Asynchronous code for callers without an event loop: a loop in a thread, and facades over it.

What OmniClient does is written once. A facade's methods run the asynchronous ones in the loop and
wait for them; any thread may call, each waits for its own."""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from omni_grpc_client.errors import CancelledCallError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

_END: Any = object()


class Bridge:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a client that nobody closed must not keep the process alive.
        self._thread = threading.Thread(target=self._turn, name="omni-client", daemon=True)
        self._closed = False
        self._closing = threading.Lock()
        self._thread.start()
        _open.add(self)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """What the coroutine gives. Where the wait is interrupted (Ctrl-C), the coroutine is
        cancelled and has ended when that is raised. Raises CancelledCallError once closed."""
        future: Future[R] = Future()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(functools.partial(_settle, future))

        self._call(start, work)
        try:
            return future.result()
        except BaseException:
            # Else it is the coroutine's own, or came after its end.
            if not future.done():
                self._call(lambda: tasks[0].cancel())
                future.exception()
            raise

    def end(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `run`, for what puts something away: nothing to do once closed, and no wait where the
        loop's own thread says it (garbage is collected in any)."""
        if self._closed:
            work.close()
        elif threading.current_thread() is self._thread:
            self._loop.create_task(work)
        else:
            self.run(work)

    def each(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """The items, one by one. Leaving the iteration leaves them as they are."""
        while (item := self.run(_next(items))) is not _END:
            yield item

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items, one by one. Leaving the iteration closes them."""
        try:
            yield from self.each(items)
        finally:
            self.end(_close(items))

    @contextmanager
    def enter(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """The context, entered here and left here."""
        entered = self.run(context.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not self.run(_leave(context, error)):
                raise
        else:
            self.run(_leave(context, None))

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(
        self, what: Callable[[], object], work: Coroutine[Any, Any, Any] | None = None
    ) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client's own thread cannot wait for itself")
        with self._closing:
            if not self._closed:
                self._loop.call_soon_threadsafe(what)
                return
        if work is not None:
            work.close()
        raise CancelledCallError("CANCELLED", "the client is closed")

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


_open: weakref.WeakSet[Bridge] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # While threads still run: later, who waits for the loop would wait for ever.
    for bridge in list(_open):
        bridge.close()


def _settle(future: Future[R], task: asyncio.Task[R]) -> None:
    if task.cancelled():
        future.set_exception(CancelledCallError("CANCELLED", "the client was closed"))
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items, _END)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


async def _leave(context: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool:
    kind = None if error is None else type(error)
    return bool(
        await context.__aexit__(kind, error, None if error is None else error.__traceback__)
    )


# ---------------------------------------------------------------- facades


class Facade(Generic[T]):
    """Something asynchronous, for callers without an event loop."""

    def __init__(self, bridge: Bridge, inner: T) -> None:
        self._bridge = bridge
        self._inner = inner


def waiting(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Facade[T], P], R]:
    """The coroutine method as one that returns its result."""

    @functools.wraps(method)
    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bridge.run(method(self._inner, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[T, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Facade[T], P], Generator[R, None, None]]:
    """The async generator method as a generator. Leaving its iteration closes it."""

    @functools.wraps(method)
    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        return self._bridge.iterate(method(self._inner, *args, **kwargs))

    return call


def entering(
    method: Callable[Concatenate[T, P], AbstractAsyncContextManager[R]],
    facade: Callable[[Bridge, R], S],
) -> Callable[Concatenate[Facade[T], P], AbstractContextManager[S]]:
    """The method that gives an async context manager as one that gives a plain one, of a facade."""

    @functools.wraps(method)
    @contextmanager
    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[S]:
        with self._bridge.enter(method(self._inner, *args, **kwargs)) as inner:
            yield facade(self._bridge, inner)

    return call
