"""A loopback HTTP server that answers as badly as a path of it says."""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from PIL import Image

Writer = asyncio.StreamWriter


def png(size: tuple[int, int] = (8, 6)) -> bytes:
    """A small picture."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def head(status: int, *headers: str) -> bytes:
    """The beginning of an answer."""
    return "\r\n".join([f"HTTP/1.1 {status} X", "Connection: close", *headers, "", ""]).encode()


def whole(body: bytes, *headers: str, status: int = 200) -> bytes:
    """An answer with its length."""
    return head(status, f"Content-Length: {len(body)}", *headers) + body


PICTURE = whole(png(), "Content-Type: image/png")
ZEROS = gzip.compress(bytes(20 << 20))

ANSWERS: dict[str, bytes] = {
    "/picture": PICTURE,
    "/untyped": whole(png()),
    "/octets": whole(png(), "Content-Type: application/octet-stream"),
    "/web": whole(b"<html>", "Content-Type: text/html; charset=utf-8"),
    "/not-a-picture": whole(b"text after all", "Content-Type: image/png"),
    "/compressed": whole(ZEROS, "Content-Type: image/png", "Content-Encoding: gzip"),
    "/archive": whole(ZEROS, "Content-Type: application/octet-stream"),
    "/404": whole(b"no", status=404),
    "/403": whole(b"no", status=403),
    "/204": head(204),
    "/206": whole(png(), status=206),
    "/429": whole(b"later", status=429),
    "/500": whole(b"the secret is 4711", status=500),
    "/503": whole(b"later", status=503),
    "/cut": head(200, "Content-Length: 1000") + b"only this",
    "/cut-chunk": head(200, "Transfer-Encoding: chunked") + b"ff\r\nonly this",
    "/claims-much": head(200, "Content-Length: 99999999999999"),
    "/no-http": b"220 smtp.example ESMTP\r\n",
    "/nothing": b"",
    "/headers": head(200, *(f"X-{n}: {'y' * 1000}" for n in range(1000))),
    "/nowhere": head(302),
    "/to-file": head(302, "Location: file:///etc/passwd"),
    "/to-ftp": head(301, "Location: ftp://127.0.0.1/x"),
    "/to-data": head(301, "Location: data:image/png;base64,xxxx"),
    "/to-user": head(301, "Location: http://user:password@127.0.0.1/"),
    "/to-picture": head(307, "Location: /picture"),
    "/twice": head(308, "Location: /to-picture"),
    "/loop": head(302, "Location: /loop"),
    "/to-broken": head(302, "Location: http://[::1"),
}


@dataclass
class Hostile:
    """The running server: what it was asked, and how long its endless answers were read."""

    url: str = ""
    port: int = 0
    requests: list[str] = field(default_factory=list)
    sent: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        """Reads one request, answers it, closes."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            path = request.split()[1]
            writer.write(ANSWERS.get(path, b""))
            if endless := ENDLESS.get(path):
                await endless(self, writer)
            await writer.drain()
        writer.close()


async def drip(server: Hostile, writer: Writer) -> None:
    """A byte every 50 ms, for ever."""
    writer.write(head(200, "Content-Length: 100000"))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def pour(server: Hostile, writer: Writer) -> None:
    """Zeros without an end."""
    writer.write(head(200))
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()
        server.sent += 1 << 16


async def hold(server: Hostile, writer: Writer) -> None:
    """Never answers."""
    await asyncio.sleep(60)


ENDLESS: dict[str, Callable[[Hostile, Writer], Coroutine[None, None, None]]] = {
    "/slow": drip,
    "/endless": pour,
    "/hold": hold,
}


@asynccontextmanager
async def hostile_server() -> AsyncIterator[Hostile]:
    """The server on a free port of 127.0.0.1."""
    hostile, handlers = Hostile(), set[asyncio.Task[None]]()

    async def handle(reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await hostile.handle(reader, writer)
        except asyncio.CancelledError:
            # Nobody reads what is left.
            writer.transport.abort()
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    hostile.port = server.sockets[0].getsockname()[1]
    hostile.url = f"http://127.0.0.1:{hostile.port}"
    try:
        yield hostile
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
