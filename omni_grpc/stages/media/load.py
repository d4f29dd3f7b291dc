"""One item of a prompt's media, from wherever it is to what a model takes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from omni_grpc.config import MediaPolicy
from omni_grpc.errors import InvalidField, InvalidMedia, OmniError, Violation
from omni_grpc.stages.media.container import decode_film, decode_sound
from omni_grpc.stages.media.decoded import Decoded, Unfit
from omni_grpc.stages.media.image import decode_image
from omni_grpc.stages.media.mime import MimeType, parse_mime_type
from omni_grpc.stages.media.raw import decode_pcm, decode_tensor
from omni_grpc.stages.media.uri import Content, read_uri
from omni_grpc.types import Media, Modality

log = logging.getLogger("omni_grpc.replica")

DECODERS: dict[Modality, Callable[[bytes, MediaPolicy], Decoded]] = {
    Modality.IMAGE: decode_image,
    Modality.AUDIO: decode_sound,
    Modality.VIDEO: decode_film,
}


async def load_media(media: Media, policy: MediaPolicy, path: str) -> Decoded:
    """The item decoded; `path` is its place in the request, "prompt.media[0]".

    Raises InvalidMedia (violation at `path`) for content that cannot be decoded or is over a limit,
    InvalidField (below `path`) for a URI or type that is not taken, MediaSource where the source of
    a URI fails. The event loop only waits: reading and decoding happen in threads. Cancelled, it
    leaves a thread that finishes its one item."""
    if media.modality not in DECODERS:
        raise InvalidField(f"{path}.modality", "is not a picture, a sound or a film")
    try:
        content = await _content(media, policy, path)
        mime = _mime_type(media, content, path)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            _threads(), partial(_decode, media, content, mime, policy, path)
        )
    except Unfit as error:
        raise invalid_media(path, str(error)) from None


def invalid_media(path: str, description: str) -> InvalidMedia:
    """The error for the item at `path`."""
    return InvalidMedia(f"{path}: {description}", violations=(Violation(path, description),))


async def _content(media: Media, policy: MediaPolicy, path: str) -> Content:
    if media.uri is not None:
        return await read_uri(media.uri, policy, f"{path}.uri")
    data = media.data if media.data is not None else b""
    if len(data) > policy.max_bytes:
        raise Unfit(f"is larger than {policy.max_bytes} bytes")
    return Content(data, "")


def _mime_type(media: Media, content: Content, path: str) -> MimeType:
    mime = parse_mime_type(media.mime_type)
    if not mime.fits(media.modality):
        raise InvalidField(f"{path}.mime_type", f"is no type of {media.modality.value}")
    if mime.name:
        return mime
    told = parse_mime_type(content.mime_type)
    if not told.fits(media.modality):
        raise Unfit(f"is {told.name!r}, which is no type of {media.modality.value}")
    return told


def _decode(
    media: Media, content: Content, mime: MimeType, policy: MediaPolicy, path: str
) -> Decoded:
    try:
        if media.tensor is not None:
            return decode_tensor(media.tensor, media.modality, mime, policy)
        if mime.raw_sound and media.modality is Modality.AUDIO:
            return decode_pcm(content.data, mime, policy)
    except ValueError as error:
        raise InvalidField(f"{path}.mime_type", str(error)) from None
    try:
        return DECODERS[media.modality](content.data, policy)
    except (Unfit, OmniError):
        raise
    except Exception as error:
        # Whatever a decoder raises, the bytes are to blame: that is what is hostile here.
        log.info("%s: %s: %s", path, type(error).__name__, error)
        raise Unfit(f"cannot be decoded as {media.modality.value}") from None


@cache
def _threads() -> ThreadPoolExecutor:
    """Own threads, as few as there are cores: each may hold a decoded item, and what else runs in
    threads does not wait behind a large film."""
    return ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="media")
