"""The process's own streams, whatever the shell made of them."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from omni_grpc.cli.failure import fail

READ_BYTES = 1 << 16


def prepare_streams() -> None:
    """Makes the three streams usable: one that is closed leads nowhere, and text that the
    terminal's encoding lacks is shown as what it is, instead of ending the command."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one. Left free, a socket would be it.
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - it stays open
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def argument(text: str, what: str) -> str:
    """The text of an argument, which is UTF-8 whatever the locale says. Raises typer.Exit."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise fail(f"{what}: is not UTF-8") from None


def read_text() -> str:
    """All of standard input. Raises typer.Exit where it cannot be read or is not UTF-8."""
    try:
        return b"".join(pieces()).decode()
    except UnicodeDecodeError as error:
        raise fail(f"standard input is not UTF-8: {error}") from None
    except OSError as error:
        raise fail(f"standard input cannot be read: {error.strerror}") from None


def pieces() -> Iterator[bytes]:
    """Standard input as it arrives, whatever it is: terminal, pipe or file."""
    while data := os.read(0, READ_BYTES):
        yield data


async def typed() -> AsyncGenerator[str, None]:
    """The text of standard input as it arrives. Raises OSError where it cannot be read."""
    # Here: the other commands do without the client and its 0.1 s.
    from omni_grpc_client.pump import pumped

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async with aclosing(pumped(pieces())) as read:
        async for data in read:
            if text := decoder.decode(data):
                yield text
    if text := decoder.decode(b"", final=True):
        yield text
