"""The line between the server and a replica process: ZeroMQ messages of msgpack, in order.

One ZeroMQ message is one list of structs: everything that one side had to say in one turn of its
event loop, so all outputs of one engine step travel together. Both ends are DEALER sockets; the
server binds, the replica connects. The address is configuration: `ipc://` on one host, `tcp://`
across hosts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq

log = logging.getLogger(__name__)

MAX_STREAK = 8
MAX_BATCH = 8
"""Messages of one turn that need not wait for more."""
# As plain integers: to combine flags costs more than to ask the socket.
POLLIN, POLLOUT, EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)

Out = TypeVar("Out")
In = TypeVar("In")


class Channel(Generic[Out, In]):
    """One end of the line. `send` never blocks and keeps order; what is sent in one turn of the
    loop goes out as one ZeroMQ message. One task receives.

    The socket is read when its descriptor says so, without `zmq.asyncio`, whose futures cost more
    than all else that is done for a message."""

    def __init__(self, socket: zmq.Socket[bytes], receives: Any) -> None:
        self._socket = socket
        self._waiter: asyncio.Future[None] | None = None
        self._streak = 0
        """Batches that were there without waiting, one after the other."""
        self._unsent: deque[bytes] = deque()
        """Batches that wait for the other end."""
        self._encoder = msgspec.msgpack.Encoder()
        self._receives = receives
        self.on_unreadable: Callable[[dict[str, Any]], None] | None = None
        """Hears of a message that is of no known form, as a mapping; the rest of its batch is read.
        By default the whole batch is refused."""
        self._decoder: msgspec.msgpack.Decoder[list[In]] = msgspec.msgpack.Decoder(list[receives])
        self._outbox: list[Out] = []
        self.repair: Callable[[list[Out], Callable[[Out], bool]], list[Out]] | None = None
        """Makes a batch that can be encoded of one that cannot, given the test for a message. By
        default what cannot be encoded is left out."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._attend)

    @classmethod
    def bind(cls, context: zmq.Context[Any], address: str, receives: Any) -> Channel[Out, In]:
        """The server's end, listening at `address`."""
        channel = cls(_dealer(context), receives)
        channel._socket.bind(address)
        return channel

    @classmethod
    def connect(cls, context: zmq.Context[Any], address: str, receives: Any) -> Channel[Out, In]:
        """The replica's end."""
        channel = cls(_dealer(context), receives)
        channel._socket.connect(address)
        return channel

    @property
    def endpoint(self) -> str:
        """The address that was bound, with a real port in place of a wildcard."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, message: Out) -> None:
        """Queues one message. It leaves when this turn of the event loop is over."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def hurry(self) -> None:
        """What was sent leaves now, if it is much: where a turn is long, because many came at once,
        the first need not wait for the last."""
        if len(self._outbox) >= MAX_BATCH:
            self._flush()

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if self._socket.closed or not batch:
            return
        self._unsent.append(self._encoded(batch))
        self._attend()

    def _attend(self) -> None:
        """Sends what waits and wakes who receives, if there is news for either.

        The descriptor tells of news once, and whatever is done with the socket may take it in: so
        this comes after all of that. It comes too where nobody receives, or the loop would turn
        without end on news that nobody takes."""
        while True:
            # Again: the other end is not there yet, or not any more.
            with suppress(zmq.Again):
                while self._unsent:
                    self._socket.send(self._unsent[0], zmq.NOBLOCK, copy=False)
                    self._unsent.popleft()
            events = int(self._socket.getsockopt(EVENTS))
            if not (self._unsent and events & POLLOUT):
                break
        if events & POLLIN:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _encoded(self, batch: list[Out]) -> bytes:
        try:
            return self._encoder.encode(batch)
        except (TypeError, ValueError, OverflowError):
            if self.repair is not None:
                return self._encoder.encode(self.repair(batch, self._sendable))
            return self._encoder.encode([one for one in batch if self._sendable(one)])

    def _sendable(self, message: Out) -> bool:
        try:
            self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError):
            log.exception("%s cannot be encoded", type(message).__name__)
            return False
        return True

    async def receive(self) -> list[In]:
        """The next batch, without what cannot be read. Cancelling loses nothing."""
        data = await self._data()
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError:
            if self.on_unreadable is None:
                raise
            return self._readable(data, self.on_unreadable)

    async def _data(self) -> bytes:
        self._streak += 1
        if self._streak > MAX_STREAK:
            # Who always finds something would never let anybody else have a turn of the loop.
            self._streak = 0
            await asyncio.sleep(0)
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._streak = 0
                self._waiter = self._loop.create_future()
            try:
                self._attend()
                await self._waiter
            finally:
                self._waiter = None

    def _readable(self, data: bytes, on_unreadable: Callable[[dict[str, Any]], None]) -> list[In]:
        batch: list[In] = []
        for message in msgspec.msgpack.decode(data):
            try:
                batch += msgspec.convert([message], list[self._receives])  # type: ignore[name-defined]
            except msgspec.ValidationError:
                log.exception("a message cannot be read")
                on_unreadable(message)
        return batch

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket; what was sent and is not out yet is dropped after `linger_ms`."""
        if self._outbox:
            self._flush()
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)


def _dealer(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    # Unlimited queues: the bound is the tasks' windows and admission, never a silently blocked
    # send.
    socket.set_hwm(0)
    return socket
