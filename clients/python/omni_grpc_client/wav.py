"""WAV files: written while the sound arrives, and read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import BinaryIO, Self

from omni_grpc_client.media import Audio, AudioEncoding, AudioFormat

# RIFF/WAVE as Microsoft's "Multimedia Programming Interface and Data Specifications 1.0" has it;
# a float format needs the extended fmt chunk and a fact chunk.
PCM, IEEE_FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MAX_DATA_BYTES = 0xFFFF_FFFF - 256
"""Sizes in the header have 32 bits."""
READABLE = {(PCM, 16): AudioEncoding.PCM_S16LE, (IEEE_FLOAT, 32): AudioEncoding.PCM_F32LE}


class WavWriter:
    """Writes sound to a WAV file as it comes: 16-bit PCM or 32-bit float, as `format` says.

    `file` is a path or a seekable binary file, which stays open. The header's sizes are set by
    `flush` and `close`; before, a reader sees an empty file. `streamed`: the file is a pipe, of
    which nothing can be changed any more; its header says the largest size."""

    def __init__(
        self,
        file: str | PathLike[str] | BinaryIO,
        format: AudioFormat,
        *,
        streamed: bool = False,
    ) -> None:
        # An unknown encoding raises here, before a file is made.
        self._frame_bytes = format.frame_bytes
        self._owned = isinstance(file, str | PathLike)
        self._file: BinaryIO = _opened(file)
        self._streamed = streamed
        self._start = 0 if streamed else self._file.tell()
        self._data_bytes = 0
        self._closed = False
        self.format = format
        self._file.write(header(format, MAX_DATA_BYTES if streamed else 0))

    @property
    def samples(self) -> int:
        """Number of samples (per channel) that were written."""
        return self._data_bytes // self._frame_bytes

    def write(self, data: bytes) -> None:
        """Appends whole samples. Raises ValueError for a cut sample, or past WAV's 4 GiB."""
        if len(data) % self._frame_bytes:
            raise ValueError(f"{len(data)} bytes are no whole samples of {self._frame_bytes} bytes")
        if self._data_bytes + len(data) > MAX_DATA_BYTES:
            raise ValueError("a WAV file holds 4 GiB at most")
        self._file.write(data)
        self._data_bytes += len(data)

    def flush(self) -> None:
        """Puts all that was written into the file, as a WAV file that is whole so far."""
        if not self._streamed:
            end = self._file.tell()
            self._file.seek(self._start)
            self._file.write(header(self.format, self._data_bytes))
            self._file.seek(end)
        self._file.flush()

    def close(self) -> None:
        """Sets the header's sizes; closes the file if it was opened here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            if self._owned:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_wav(file: str | PathLike[str] | BinaryIO) -> Audio:
    """The sound of a WAV file of 16-bit PCM or 32-bit float samples. A file that was not closed,
    or was written to a pipe, holds what is there.

    Raises ValueError for another file, OSError for one that cannot be read."""
    with _reading(file) as stream:
        head = stream.read(12)
        if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
            raise ValueError("not a WAV file")
        form: AudioFormat | None = None
        while len(chunk := stream.read(8)) == 8:
            name, size = struct.unpack("<4sI", chunk)
            if name == b"data":
                if form is None:
                    break
                data = stream.read(size)
                return Audio(data[: len(data) - len(data) % form.frame_bytes], form)
            # Chunks begin at even places.
            content = stream.read(size + size % 2)
            if name == b"fmt ":
                form = _read_format(content)
    raise ValueError("a WAV file without samples or their format")


def _read_format(content: bytes) -> AudioFormat:
    if len(content) < 16:
        raise ValueError("a WAV file with a cut format")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if kind == EXTENSIBLE and len(content) >= 26:
        # The real kind begins the GUID of the sub-format.
        (kind,) = struct.unpack_from("<H", content, 24)
    encoding = READABLE.get((kind, bits))
    if encoding is None or not channels:
        raise ValueError(f"neither 16-bit PCM nor 32-bit float: format {kind}, {bits} bits")
    return AudioFormat(encoding, rate, channels)


@contextmanager
def _reading(file: str | PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(file, str | PathLike):
        with open(file, "rb") as opened:
            yield opened
    else:
        yield file


def _opened(file: str | PathLike[str] | BinaryIO) -> BinaryIO:
    return open(file, "wb") if isinstance(file, str | PathLike) else file


def header(format: AudioFormat, data_bytes: int) -> bytes:
    """All of the file that comes before the samples; as long for any number of them."""
    floating = format.encoding is AudioEncoding.PCM_F32LE
    frame = format.frame_bytes
    fields = struct.pack(
        "<HHIIHH",
        IEEE_FLOAT if floating else PCM,
        format.channels,
        format.sample_rate_hz,
        format.sample_rate_hz * frame,
        frame,
        8 * frame // format.channels,
    )
    chunks = _chunk(b"fmt ", fields + (b"\0\0" if floating else b""))
    if floating:
        chunks += _chunk(b"fact", struct.pack("<I", data_bytes // frame))
    chunks += b"data" + struct.pack("<I", data_bytes)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks) + data_bytes) + b"WAVE" + chunks


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content
