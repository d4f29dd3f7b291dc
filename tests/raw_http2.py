"""An HTTP/2 client without gRPC, to see what a server does with a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, PingAckReceived, PingReceived

HEADER = 9
"""Bytes of a frame's head; the first three are the size of the rest."""


@dataclass
class Heard:
    """What came from the server."""

    acknowledged: int = 0
    """Pings of ours that it answered."""
    pings: int = 0
    """Pings of its own."""
    reason: bytes | None = None
    """Of its GOAWAY."""
    closed: bool = False
    """Whether it closed the connection."""


class RawClient:
    """A client that pings when it likes; gRPC's own would hold back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = H2Connection(H2Configuration(client_side=True))
        self._connection.initiate_connection()
        self._number = 0
        self._data = b""

    def ping(self) -> None:
        """Pings."""
        self._number += 1
        self._connection.ping(self._number.to_bytes(8, "big"))
        self._writer.write(self._connection.data_to_send())

    async def listen(self, seconds: float, *, answer: bool = True) -> Heard:
        """What is heard in that time, or until the server says goodbye or closes. `answer`: whether
        we answer, to pings for one."""
        heard = Heard()
        self._writer.write(self._connection.data_to_send())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while data := await self._reader.read(1 << 16):
                    self._take(data, heard)
                    if heard.reason is not None:
                        return heard
                    answers = self._connection.data_to_send()
                    if answer:
                        self._writer.write(answers)
                heard.closed = True
        return heard

    def _take(self, data: bytes, heard: Heard) -> None:
        self._data += data
        while len(self._data) >= HEADER and heard.reason is None:
            size = HEADER + int.from_bytes(self._data[:3], "big")
            if len(self._data) < size:
                return
            frame, self._data = self._data[:size], self._data[size:]
            # Frame by frame: h2 takes nothing behind a GOAWAY.
            for event in self._connection.receive_data(frame):
                match event:
                    case PingAckReceived():
                        heard.acknowledged += 1
                    case PingReceived():
                        heard.pings += 1
                    case ConnectionTerminated():
                        heard.reason = event.additional_data or b""

    @property
    def max_streams(self) -> int:
        """How many streams the server allows at once."""
        return self._connection.remote_settings.max_concurrent_streams


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    """A connection of its own to the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
