"""Chunks of a film as they are sent: raw frames, or fragments of one mp4.

A chunk that waits for the next one's first frame before it can be written would be late by a chunk.
So each chunk becomes a small mp4 of its own, of which only the fragment is kept, its times moved to
where it belongs (ISO/IEC 14496-12, 8.8: moof with tfdt); the first keeps the header too. Blocking:
call it in a thread."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction

import av
from av.video.stream import VideoStream

from omni_grpc.stages.encode import CONSTANT_QUALITY, RAW_VIDEO, Pixels

MP4 = "video/mp4"
FILM_TYPES = (RAW_VIDEO, MP4)
"""The forms that a film in the making can have; the first is the default."""

_HEADER = (b"ftyp", b"moov")
_FRAGMENT = (b"moof", b"mdat")


def encode_chunk(pixels: Pixels, mime_type: str, first_frame: int, fps: float) -> bytes:
    """Frames [n, height, width, 3], of which the first is the film's number `first_frame`. The
    chunks' bytes, joined, are one file."""
    if mime_type == RAW_VIDEO:
        return pixels.tobytes()
    rate = Fraction(fps).limit_denominator(1001)
    file, time_base = _whole_file(pixels, rate)
    kept = _FRAGMENT if first_frame else _HEADER + _FRAGMENT
    data = bytearray(b"".join(box for name, box in _boxes(file) if name in kept))
    _move(data, round(first_frame / rate / time_base), number=first_frame)
    return bytes(data)


def _whole_file(pixels: Pixels, rate: Fraction) -> tuple[bytes, Fraction]:
    """The frames as an mp4 with one fragment, and the unit of its times in seconds."""
    file = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with av.open(file, "w", format="mp4", options=options) as container:
        stream = _h264(container, pixels, rate)
        for place, picture in enumerate(pixels):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = place
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        time_base = stream.time_base
    assert time_base is not None
    return file.getvalue(), time_base


def _h264(container: av.container.OutputContainer, pixels: Pixels, rate: Fraction) -> VideoStream:
    stream: VideoStream = container.add_stream("libx264", rate=rate)
    _, stream.height, stream.width, _ = pixels.shape
    # Chroma at half size needs even sides.
    even = stream.width % 2 == 0 and stream.height % 2 == 0
    stream.pix_fmt = "yuv420p" if even else "yuv444p"
    stream.gop_size = len(pixels)
    stream.options = {
        "crf": CONSTANT_QUALITY,
        "preset": "veryfast",
        "tune": "zerolatency",
        "sc_threshold": "0",
        "threads": "1",
    }
    return stream


def _boxes(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 0
    while place < len(file):
        (size,) = struct.unpack_from(">I", file, place)
        yield file[place + 4 : place + 8], file[place : place + size]
        place += size


def _move(data: bytearray, time: int, number: int) -> None:
    """Sets the fragment's sequence number and the time of its first frame."""
    # Behind the box's name stand version and flags, then the field; PyAV writes version 1 of tfdt.
    struct.pack_into(">I", data, data.index(b"mfhd") + 8, number + 1)
    struct.pack_into(">Q", data, data.index(b"tfdt") + 8, time)
