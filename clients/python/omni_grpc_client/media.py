"""Sound, pictures, film and arrays: their formats, and whole pieces of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from omni_grpc.v1 import common_pb2, output_pb2


class Modality(StrEnum):
    """What kind of content an input or an output is."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    TENSOR = "tensor"
    UNKNOWN = "unknown"
    """Of a contract newer than this client."""


class AudioEncoding(StrEnum):
    """How samples are written as bytes: little-endian, channels interleaved."""

    PCM_S16LE = "pcm_s16le"
    PCM_F32LE = "pcm_f32le"
    UNKNOWN = "unknown"


EXTENSIONS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
}
RAW_FRAMES = "video/x-raw-rgb"

SAMPLE_BYTES = {AudioEncoding.PCM_S16LE: 2, AudioEncoding.PCM_F32LE: 4}


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of a stream of sound."""

    encoding: AudioEncoding = AudioEncoding.PCM_S16LE
    sample_rate_hz: int = 24000
    channels: int = 1

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of all channels. Raises ValueError for an encoding unknown here."""
        if self.encoding not in SAMPLE_BYTES:
            raise ValueError(f"an audio encoding that this client does not know: {self.encoding}")
        return SAMPLE_BYTES[self.encoding] * self.channels


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """The format of a picture; width and height in pixels, 0: not known beforehand."""

    mime_type: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """The format of a film; a number that is 0 is not known beforehand."""

    mime_type: str
    width: int
    height: int
    fps: float


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of one final output. `format` is None where only the chunks say it."""

    stage: str
    modality: Modality
    format: AudioFormat | ImageFormat | VideoFormat | None


@dataclass(frozen=True, slots=True)
class Audio:
    """Whole sound."""

    data: bytes
    format: AudioFormat

    @property
    def samples(self) -> int:
        """Number of samples per channel."""
        return len(self.data) // self.format.frame_bytes

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.samples / self.format.sample_rate_hz

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a WAV file."""
        # Here: the writer needs this module's formats.
        from omni_grpc_client.wav import WavWriter

        with WavWriter(path, self.format) as writer:
            writer.write(self.data)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Audio:
        """The sound of a WAV file. Raises OSError, and ValueError for what is no WAV file of 16-bit
        PCM or 32-bit float samples."""
        from omni_grpc_client.wav import read_wav

        return read_wav(path)


@dataclass(frozen=True, slots=True)
class Image:
    """A whole picture: the bytes of a file of type `mime_type`."""

    data: bytes
    mime_type: str
    width: int
    height: int

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file as it came. Raises ValueError where `path` names another type."""
        check_extension(path, self.mime_type)
        Path(path).write_bytes(self.data)


@dataclass(frozen=True, slots=True)
class Video:
    """A whole film: a file, or raw frames where `mime_type` is "video/x-raw-rgb"."""

    data: bytes
    mime_type: str
    frames: int

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file as it came. Raises ValueError for raw frames, which are none, and where
        `path` names another type."""
        check_film(path, self.mime_type)
        Path(path).write_bytes(self.data)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole array: elements of `dtype` ("float32", ...), row-major, little-endian."""

    name: str
    data: bytes
    dtype: str
    shape: tuple[int, ...]


def check_extension(path: str | PathLike[str], mime_type: str) -> None:
    """Raises ValueError where the name's extension is that of another type than `mime_type`."""
    suffix = Path(path).suffix.lower()
    if EXTENSIONS.get(suffix, mime_type) != mime_type:
        raise ValueError(f"{path}: is of type {mime_type}, whatever {suffix} says")


def check_film(path: str | PathLike[str], mime_type: str) -> None:
    """As `check_extension`, and raises ValueError for raw frames."""
    if mime_type == RAW_FRAMES:
        raise ValueError(f"{path}: raw frames are no file; ask for video/mp4 as output_mime_type")
    check_extension(path, mime_type)


Kind = TypeVar("Kind", bound=StrEnum)


def decode_name(names: EnumTypeWrapper, number: int, prefix: str) -> str:
    """An enum's value as our lower-case name; "unknown" where a newer contract added it."""
    try:
        return names.Name(number).removeprefix(prefix).lower()
    except ValueError:
        return "unknown"


def decode_enum(kind: type[Kind], names: EnumTypeWrapper, number: int, prefix: str) -> Kind:
    """An enum's value as a member of `kind`, which has a member "unknown"."""
    try:
        return kind(decode_name(names, number, prefix))
    except ValueError:
        return kind("unknown")


def decode_modality(number: int) -> Modality:
    """A modality of the contract."""
    return decode_enum(Modality, common_pb2.Modality, number, "MODALITY_")


def encode_modality(modality: Modality | str) -> common_pb2.Modality:
    """A modality as the contract's number. Raises ValueError for a name that it does not have."""
    number = common_pb2.Modality.Value(f"MODALITY_{Modality(modality).name}")
    return cast("common_pb2.Modality", number)


def decode_audio_format(message: common_pb2.AudioFormat) -> AudioFormat:
    """A format of sound."""
    encoding = decode_enum(
        AudioEncoding, common_pb2.AudioEncoding, message.encoding, "AUDIO_ENCODING_"
    )
    return AudioFormat(encoding, message.sample_rate_hz, message.channels)


def encode_audio_format(form: AudioFormat) -> common_pb2.AudioFormat:
    """A format of sound as the contract's message. Raises ValueError for an unknown encoding."""
    encoding = common_pb2.AudioEncoding.Value(f"AUDIO_ENCODING_{form.encoding.name}")
    return common_pb2.AudioFormat(
        encoding=cast("common_pb2.AudioEncoding", encoding),
        sample_rate_hz=form.sample_rate_hz,
        channels=form.channels,
    )


def decode_output_format(message: output_pb2.OutputFormat) -> OutputFormat:
    """The form of a final output."""
    form: AudioFormat | ImageFormat | VideoFormat | None = None
    match message.WhichOneof("format"):
        case "audio":
            form = decode_audio_format(message.audio)
        case "image":
            image = message.image
            form = ImageFormat(image.mime_type, image.width, image.height)
        case "video":
            video = message.video
            form = VideoFormat(video.mime_type, video.width, video.height, video.fps)
    return OutputFormat(message.stage, decode_modality(message.modality), form)
