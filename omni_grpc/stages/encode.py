"""What is drawn, in the form that the client chose: picture files, films, raw values.

Pixels are uint8 RGB, [height, width, 3]; values float32 from 0 to 1, [3, height, width]. Blocking:
call it in a thread."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import PictureType
from PIL import Image as Pillow

from omni_grpc.types import DataType, Image, Tensor, Tensors, Video

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

TENSOR = "tensor"
RAW_VIDEO = "video/x-raw-rgb"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", TENSOR)
"""The forms that a picture can have; the first is the default."""
VIDEO_TYPES = ("video/mp4", RAW_VIDEO, TENSOR)
"""The forms that a film can have; the first is the default."""

PREVIEW_SIDE = 256
"""Longest side of a preview, in pixels: one always fits a message."""
RAW_BYTES = 512 << 10
"""Raw frames are handed over in groups of about this size."""
FRAGMENT_FRAMES = 8
"""Frames of one mp4 fragment: what a player must wait for."""
CONSTANT_QUALITY = "18"
"""libx264's rate factor: 18 is hard to tell from the original."""

_OPTIONS: dict[str, dict[str, object]] = {
    "image/png": {"format": "PNG"},
    # No chroma subsampling: it bleeds colours over edges, most of all in small pictures.
    "image/jpeg": {"format": "JPEG", "quality": 92, "subsampling": 0},
    # Without loss: with it, WebP always subsamples chroma.
    "image/webp": {"format": "WEBP", "lossless": True},
}


def to_pixels(values: Values) -> Pixels:
    """[..., 3, height, width] of 0 to 1 → [..., height, width, 3] of 0 to 255. Beyond is cut; what
    is no number is black."""
    levels = np.nan_to_num(values.clip(0, 1) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.moveaxis(levels, -3, -1))


def encode_picture(values: Values, mime_type: str) -> Image | Tensors:
    """A picture [3, height, width] in one of IMAGE_TYPES."""
    if mime_type == TENSOR:
        return encode_values("image", values)
    return encode_pixels(to_pixels(values), mime_type)


def encode_pixels(pixels: Pixels, mime_type: str) -> Image:
    """A picture file of one of IMAGE_TYPES but TENSOR."""
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, **_OPTIONS[mime_type])  # type: ignore[arg-type]
    height, width, _ = pixels.shape
    return Image(file.getvalue(), mime_type, width, height)


def encode_preview(values: Values) -> Image:
    """A small picture of what [3, height, width] looks like: PNG, at most PREVIEW_SIDE a side."""
    picture = Pillow.fromarray(to_pixels(values))
    picture.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    return encode_pixels(np.asarray(picture), "image/png")


def encode_values(name: str, values: Values) -> Tensors:
    """An array as it is."""
    data = np.ascontiguousarray(values, "<f4").tobytes()
    return Tensors({name: Tensor(data, DataType.FLOAT32, values.shape)})


def encode_film(frames: Values, fps: float, mime_type: str) -> Iterator[Video | Tensors]:
    """A whole film [frames, 3, height, width] in one of VIDEO_TYPES, part by part."""
    if mime_type == TENSOR:
        yield encode_values("video", frames)
        return
    _, _, height, width = frames.shape
    film = open_film(mime_type, width, height, fps)
    for frame in frames:
        yield from film.push(to_pixels(frame))
    yield from film.finish()


class Film(ABC):
    """A film in the making: `push` takes a frame [height, width, 3] and gives what is ready,
    `finish` gives the rest, of which the last part has `last` set."""

    def __init__(self, mime_type: str, width: int, height: int) -> None:
        self._form = (mime_type, width, height)
        self._first = 0
        """Number of the first frame that was not yet given."""
        self._frames = 0
        """Frames pushed."""

    @abstractmethod
    def push(self, pixels: Pixels, events: tuple[str, ...] = ()) -> Iterable[Video]:
        """Takes the next frame; `events` are in force from it on."""

    @abstractmethod
    def finish(self) -> Iterable[Video]:
        """The rest."""

    def _part(
        self, data: bytes, end: int, events: tuple[str, ...] = (), *, last: bool = False
    ) -> Video:
        """The frames from the first that was not given to `end`, exclusive."""
        mime_type, width, height = self._form
        first, self._first = self._first, end
        return Video(data, mime_type, first, end - first, width, height, last, events)


def open_film(mime_type: str, width: int, height: int, fps: float) -> Film:
    """A film of one of VIDEO_TYPES but TENSOR."""
    if mime_type == RAW_VIDEO:
        return _RawFilm(mime_type, width, height)
    return _Mp4Film(mime_type, width, height, fps)


class _RawFilm(Film):
    """Frames as they are, some at a time. One part is kept back, so that the last is known."""

    def __init__(self, mime_type: str, width: int, height: int) -> None:
        super().__init__(mime_type, width, height)
        self._data: list[bytes] = []
        self._group = max(1, RAW_BYTES // (width * height * 3))
        self._events: tuple[str, ...] = ()

    def push(self, pixels: Pixels, events: tuple[str, ...] = ()) -> Iterable[Video]:
        full = len(self._data) == self._group
        if self._data and (full or events != self._events):
            yield self._flush()
        self._data.append(pixels.tobytes())
        self._events = events
        self._frames += 1

    def finish(self) -> Iterable[Video]:
        yield self._flush(last=True)

    def _flush(self, *, last: bool = False) -> Video:
        data, self._data = b"".join(self._data), []
        return self._part(data, self._frames, self._events, last=last)


class _Mp4Film(Film):
    """H.264 in fragmented mp4 (ISO/IEC 14496-12, movie fragments): each fragment goes out as soon
    as it is encoded, and players start on the first.

    Without B-frames and look-ahead each frame comes out of the encoder at once, so the bytes that
    appear at a key frame are the fragment of the frames before it. A fragment begins every
    FRAGMENT_FRAMES, and where other events come into force."""

    def __init__(self, mime_type: str, width: int, height: int, fps: float) -> None:
        super().__init__(mime_type, width, height)
        self._sink = _Sink()
        self._events: tuple[str, ...] = ()
        self._container = av.open(
            self._sink,
            "w",
            format="mp4",
            options={"movflags": "frag_keyframe+empty_moov+default_base_moof"},
        )
        rate = Fraction(fps).limit_denominator(1001)
        self._stream = self._container.add_stream("libx264", rate=rate)
        self._stream.width, self._stream.height = width, height
        # Chroma at half size needs even sides.
        even = width % 2 == 0 and height % 2 == 0
        self._stream.pix_fmt = "yuv420p" if even else "yuv444p"
        self._stream.gop_size = 2 * FRAGMENT_FRAMES  # never by itself: `push` says where
        self._stream.options = {
            "crf": CONSTANT_QUALITY,
            "preset": "veryfast",
            "tune": "zerolatency",
            "sc_threshold": "0",
            "forced-idr": "1",
        }

    def push(self, pixels: Pixels, events: tuple[str, ...] = ()) -> Iterable[Video]:
        waiting = self._frames - self._first
        starts = not waiting or waiting == FRAGMENT_FRAMES or events != self._events
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts = self._frames
        frame.pict_type = PictureType.I if starts else PictureType.NONE
        self._container.mux(self._stream.encode(frame))
        if starts and waiting:
            yield self._part(self._sink.take(), self._frames, self._events)
        self._events = events
        self._frames += 1

    def finish(self) -> Iterable[Video]:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        yield self._part(self._sink.take(), self._frames, self._events, last=True)


class _Sink:
    """What the container writes to: it only ever appends."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data
