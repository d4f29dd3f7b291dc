"""Formats of sound, pictures and film, arrays, and the media that a prompt may bring."""

from __future__ import annotations

from enum import Enum

import msgspec


class Modality(Enum):
    """What kind of content an input or an output is."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    TENSOR = "tensor"


class DataType(Enum):
    """Element type of a Tensor; the values are numpy's names, except bfloat16, which numpy
    lacks."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_SIZES[self]


_ITEM_SIZES = {
    DataType.FLOAT32: 4,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT64: 8,
    DataType.INT8: 1,
    DataType.UINT8: 1,
    DataType.INT16: 2,
    DataType.INT32: 4,
    DataType.INT64: 8,
    DataType.BOOL: 1,
}


class AudioEncoding(Enum):
    """How samples are written; little-endian, channels interleaved."""

    PCM_S16LE = "pcm_s16le"
    PCM_F32LE = "pcm_f32le"

    @property
    def sample_width(self) -> int:
        """Bytes of one sample of one channel."""
        return 2 if self is AudioEncoding.PCM_S16LE else 4


class AudioFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of a stream of sound."""

    sample_rate_hz: int
    channels: int = 1
    encoding: AudioEncoding = AudioEncoding.PCM_S16LE

    @property
    def frame_width(self) -> int:
        """Bytes of one sample over all channels."""
        return self.encoding.sample_width * self.channels


class ImageFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of pictures; 0 is not known yet."""

    mime_type: str
    width: int = 0
    height: int = 0


class VideoFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of film; 0 is not known yet."""

    mime_type: str
    width: int = 0
    height: int = 0
    fps: float = 0.0


MediaFormat = AudioFormat | ImageFormat | VideoFormat


class Tensor(msgspec.Struct, frozen=True, tag=True):
    """A dense array: row-major little-endian elements, product(shape) * itemsize bytes."""

    data: bytes
    dtype: DataType
    shape: tuple[int, ...]


class Media(msgspec.Struct, frozen=True, tag=True):
    """A picture, sound or film of a prompt; exactly one of `data`, `uri`, `tensor` is set."""

    modality: Modality
    data: bytes | None = None
    uri: str | None = None
    tensor: Tensor | None = None
    mime_type: str = ""
    uuid: str = ""
