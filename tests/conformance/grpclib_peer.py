"""grpclib: gRPC in pure Python, with none of the C core in it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpclib.client import Channel, StreamStreamMethod
from grpclib.exceptions import GRPCError, StreamTerminatedError

from tests.conformance.check import Json, Outcome
from tests.conformance.grpcio_peer import METHODS, UNARY_REQUESTS
from tests.conformance.run import Call
from tests.conformance.tool_peers import fill

assert error_details_pb2  # grpclib decodes details of types that were imported


class GrpclibCall:
    """A call, driven by a task of the peer's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: Channel, rpc: str) -> None:
        self._loop = loop
        path, self._request, response = METHODS[rpc]
        self._single = rpc in UNARY_REQUESTS
        self._method: Any = StreamStreamMethod(channel, path, self._request, response)
        self._to_send: asyncio.Queue[Any] = asyncio.Queue()
        self._received: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._outcome = Outcome(reserved=False)
        self._task: asyncio.Task[None] | None = None

    def begin(self, **options: Any) -> None:
        """Starts the task."""

        def start() -> None:
            self._task = self._loop.create_task(self._drive(**options))

        self._loop.call_soon_threadsafe(start)

    async def _drive(self, **options: Any) -> None:
        outcome = self._outcome
        try:
            async with self._method.open(**options) as stream:
                try:
                    await self._talk(stream)
                finally:
                    outcome.headers = _flat(stream.initial_metadata)
                    outcome.trailers = _flat(stream.trailing_metadata)
        except GRPCError as error:
            _fill(outcome, error)
        except StreamTerminatedError as error:
            outcome.code, outcome.message = "UNAVAILABLE", str(error)
        except TimeoutError:
            outcome.code = "DEADLINE_EXCEEDED"
        except asyncio.CancelledError:
            outcome.code = "CANCELLED"
        finally:
            self._received.put(None)

    async def _talk(self, stream: Any) -> None:
        await stream.send_request()
        sending = self._loop.create_task(self._send_all(stream))
        try:
            while (message := await stream.recv_message()) is not None:
                self._received.put(MessageToDict(message))
            await stream.recv_trailing_metadata()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, stream: Any) -> None:
        try:
            if self._single:
                # An answer may come before a half-close of its own; its reset then looks like a
                # failure to grpclib.
                await stream.send_message(await self._to_send.get(), end=True)
                return
            while (message := await self._to_send.get()) is not None:
                await stream.send_message(message)
            await stream.end()
        except StreamTerminatedError:
            pass  # The call has ended; who reads hears why.

    def send(self, message: Json) -> None:
        """Sends a message."""
        self._put(ParseDict(message, self._request()))

    def close(self) -> None:
        """Half-closes."""
        self._put(None)

    def _put(self, item: Any) -> None:
        self._loop.call_soon_threadsafe(self._to_send.put_nowait, item)

    def cancel(self) -> None:
        """Cancels."""
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)

    def read(self) -> Json | None:
        """The next message; None when the call has ended."""
        return self._received.get(timeout=30)

    def outcome(self) -> Outcome:
        """How it ended."""
        return self._outcome


class GrpclibPeer:
    """A channel to a server, on an event loop of its own."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._channel = self._on_loop(_channel(host, int(port)))

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def start(self, rpc: str, metadata: Mapping[str, str], deadline_s: float) -> Call:
        """Starts a call."""
        call = GrpclibCall(self._loop, self._channel, rpc)
        call.begin(timeout=deadline_s, metadata=metadata)
        return call

    def close(self) -> None:
        """Closes the channel and ends the loop."""
        self._on_loop(_close(self._channel))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _channel(host: str, port: int) -> Channel:
    return Channel(host, port)


async def _close(channel: Channel) -> None:
    channel.close()


def _flat(metadata: Any) -> dict[str, str]:
    return {name: str(value) for name, value in (metadata or {}).items()}


def _fill(outcome: Outcome, error: GRPCError) -> None:
    status = Status(code=error.status.value, message=error.message or "")
    for detail in error.details or ():
        status.details.add().Pack(detail)
    fill(outcome, status)
