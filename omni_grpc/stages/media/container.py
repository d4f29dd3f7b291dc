"""Sound and film files, by FFmpeg (PyAV).

FFmpeg knows formats that name other files and addresses (playlists), which it would open. So the
format is found here, by its first bytes, among a few; FFmpeg gets its name and no protocol."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from omni_grpc.config import MediaPolicy
from omni_grpc.stages.media.decoded import (
    DecodedAudio,
    DecodedVideo,
    Unfit,
    check_decoded_bytes,
    check_pixels,
)

MAX_RATE = 48_000
"""Sound of a higher rate is brought down to this: no model hears more, and memory is bounded."""
RATES = range(4_000, 384_001)

# (offset, bytes, FFmpeg's name of the demuxer)
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (8, b"WAVE", "wav"),
    (8, b"AVI ", "avi"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (4, b"ftyp", "mov"),
    (0, b"GIF8", "gif"),
)


def demuxer(data: bytes) -> str:
    """FFmpeg's name of the file's format. Raises Unfit for one that is not among ours."""
    for offset, magic, name in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return name
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        # MPEG audio's frame sync; a layer of 0 is AAC in ADTS.
        return "mp3" if data[1] & 0x06 else "aac"
    raise Unfit(
        "is not of a known format (WAV, FLAC, Ogg, MP3, AAC, MP4, WebM, Matroska, AVI, GIF)"
    )


@contextmanager
def opened(data: bytes, policy: MediaPolicy) -> Iterator[Any]:
    """The file as a container. Also while it is only looked at, no frame over the limit is made."""
    options = {"max_pixels": str(policy.max_pixels), "protocol_whitelist": "none", "threads": "1"}
    with av.open(
        io.BytesIO(data), format=demuxer(data), options=options, metadata_errors="replace"
    ) as container:
        yield container


def decode_sound(data: bytes, policy: MediaPolicy) -> DecodedAudio:
    """The first sound track of a file. Raises Unfit, or what FFmpeg raises for broken files."""
    with opened(data, policy) as container:
        if not container.streams.audio:
            raise Unfit("holds no sound")
        stream = container.streams.audio[0]
        check_rate(stream.rate)
        rate = min(stream.rate, MAX_RATE)
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
        frames = chain(container.decode(stream), (None,))
        blocks = (out.to_ndarray()[0] for frame in frames for out in resampler.resample(frame))
        return DecodedAudio(joined(blocks, rate, policy), rate)


def check_rate(rate: int) -> None:
    """Raises Unfit for a sample rate that no sound has."""
    if rate not in RATES:
        raise Unfit(f"has {rate} samples a second, not {RATES[0]} to {RATES[-1]}")


def joined(
    blocks: Iterator[NDArray[np.float32]], rate: int, policy: MediaPolicy
) -> NDArray[np.float32]:
    """All samples. Raises Unfit as soon as they are too many, and if there are none."""
    parts: list[NDArray[np.float32]] = []
    count = 0
    for block in blocks:
        parts.append(block)
        count += len(block)
        if count > policy.max_audio_s * rate:
            raise Unfit(f"is longer than {policy.max_audio_s:g} s")
        check_decoded_bytes(count * 4, policy.max_decoded_bytes)
    if not count:
        raise Unfit("holds no samples")
    samples: NDArray[np.float32] = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise Unfit("holds samples that are not numbers")
    return samples


def decode_film(data: bytes, policy: MediaPolicy) -> DecodedVideo:
    """The frames of a file's first film. Raises Unfit, or what FFmpeg raises for broken files."""
    with opened(data, policy) as container:
        if not container.streams.video:
            raise Unfit("holds no film")
        stream = container.streams.video[0]
        check_pixels(stream.width, stream.height, policy.max_pixels)
        # One buffer that grows: a list of frames would need twice the memory to become one array.
        buffer, count, size = bytearray(), 0, (0, 0)
        for frame in container.decode(stream):
            count += 1
            if count > policy.max_frames:
                raise Unfit(f"has more than {policy.max_frames} frames")
            # All frames get the size of the first.
            size = size if count > 1 else (frame.width, frame.height)
            check_pixels(frame.width, frame.height, policy.max_pixels)
            check_decoded_bytes(count * size[0] * size[1] * 3, policy.max_decoded_bytes)
            buffer += frame.to_ndarray(format="rgb24", width=size[0], height=size[1]).data
        if not count:
            raise Unfit("holds no frame")
        frames = np.frombuffer(buffer, np.uint8).reshape(count, size[1], size[0], 3)
        return DecodedVideo(frames, float(stream.average_rate or 0))
