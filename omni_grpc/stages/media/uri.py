"""URIs of media: `data:` always, `file:` below the media root, `http(s):` where the policy says
so."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from omni_grpc.config import MediaPolicy
from omni_grpc.errors import InvalidField
from omni_grpc.stages.media.decoded import Unfit
from omni_grpc.stages.media.fetch import fetch

MAX_URI = 8192
"""Longest URI that is not a `data:` one, in characters."""


@dataclass(frozen=True, slots=True)
class Content:
    """What was read, and the MIME type that its source gave it ("" if none)."""

    data: bytes
    mime_type: str


async def read_uri(uri: str, policy: MediaPolicy, path: str) -> Content:
    """The content of a URI. `path` is the URI's own place in the request.

    Raises InvalidField for a URI that is not read here, Unfit for content that cannot be taken,
    MediaSource where the fault is the source's. Cancelling closes the connection."""
    scheme = uri.partition(":")[0].lower()
    if scheme == "data":
        # In a thread: it may be as long as a message.
        return await asyncio.to_thread(read_data_uri, uri, policy.max_bytes, path)
    if len(uri) > MAX_URI:
        raise InvalidField(path, f"is longer than {MAX_URI} characters")
    if scheme == "file":
        if policy.root is None:
            raise InvalidField(path, "file: URIs are not read here")
        return Content(
            await asyncio.to_thread(read_file, uri, policy.root, policy.max_bytes, path), ""
        )
    if scheme in ("http", "https"):
        if not policy.http:
            raise InvalidField(path, "http(s): URIs are not read here")
        return Content(*await fetch(uri, policy, path))
    raise InvalidField(path, "is no data:, http(s): or file: URI")


def read_data_uri(uri: str, most: int, path: str) -> Content:
    """The content of `data:[TYPE][;base64],DATA` (RFC 2397)."""
    head, comma, body = uri.partition(",")
    if not comma:
        raise InvalidField(path, "is a data: URI without a comma")
    mime_type = head[len("data:") :]
    coded = mime_type.lower().endswith(";base64")
    # Four characters are three bytes; a percent sign makes one byte of three characters.
    if len(body) // 3 > most if not coded else len(body) // 4 * 3 > most * 3:
        raise Unfit(f"is larger than {most} bytes")
    try:
        data = unquote_to_bytes(body) if "%" in body or not coded else body.encode("ascii")
        if coded:
            mime_type = mime_type[: -len(";base64")]
            data = base64.b64decode(data, validate=True)
    except (binascii.Error, UnicodeError):
        raise InvalidField(path, "is a data: URI whose content is broken") from None
    if len(data) > most:
        raise Unfit(f"is larger than {most} bytes")
    return Content(data, mime_type)


def read_file(uri: str, root: str, most: int, path: str) -> bytes:
    """The bytes of a file below the media root. No link leads out of it."""
    try:
        descriptor = _open_below(Path(root).resolve(), uri)
    except (OSError, ValueError, RuntimeError):
        # One answer for what is absent and for what is outside: it tells nothing of the disk.
        raise InvalidField(path, "is no file that can be read below the media root") from None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unfit(f"is larger than {most} bytes")
    return data


def _open_below(base: Path, uri: str) -> int:
    """A descriptor of the file that the URI names. Raises OSError, ValueError or RuntimeError."""
    parts = urlsplit(uri)
    target = Path(unquote(parts.path)).resolve(strict=True)
    if parts.netloc not in ("", "localhost") or not target.is_relative_to(base):
        raise PermissionError(uri)
    # Not blocking: a pipe must not hold the thread.
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    # What was opened counts, not what stood there a moment before.
    opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if opened.is_relative_to(base) and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise PermissionError(uri)
