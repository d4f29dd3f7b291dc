"""Files for outputs. Each is written beside its place and moved there when the call succeeded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from omni_grpc.cli.call import CommandError
from omni_grpc.cli.failure import ExitCode
from omni_grpc_client import (
    Accepted,
    AudioChunk,
    AudioFormat,
    Event,
    ImageChunk,
    Modality,
    TextDelta,
    VideoChunk,
    WavWriter,
)

MIME_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
}


class OutFile:
    """One output on its way into a file. A subclass knows which events are its own."""

    modality: Modality

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.warning = ""
        self._empty = True

    def take(self, event: Event) -> None:
        """Writes the event if it is of this output."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        self._empty = False
        self.file.write(data)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self.file.close()

    def complete(self) -> None:
        """Completes the file, still beside its place. Raises CommandError where nothing came."""
        if self._empty:
            message = f"{self.path}: not written, no {self.modality} came"
            raise CommandError(message, code=ExitCode.OTHER)
        self.close()

    def commit(self) -> str:
        """Puts the completed file in its place; says so."""
        os.replace(self.file.name, self.path)
        return f"wrote {self.path}{self.warning}"

    def check_type(self, mime_type: str) -> None:
        """Notes where the content is not what the file's name says."""
        if mime_type != MIME_TYPES[self.path.suffix.lower()]:
            self.warning = f" (it is {mime_type}, whatever its name says)"


class TextFile(OutFile):
    """The first answer's text, UTF-8. No text at all is an answer too."""

    modality = Modality.TEXT

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        self._empty = False

    def take(self, event: Event) -> None:
        if isinstance(event, TextDelta) and event.index == 0:
            self.write(event.text.encode())


class SoundFile(OutFile):
    """A WAV file; also one without samples, where the format is known and no sound came."""

    modality = Modality.AUDIO

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        self._writer: WavWriter | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Accepted):
            for output in event.outputs:
                if isinstance(output.format, AudioFormat):
                    self._open(output.format)
        elif isinstance(event, AudioChunk):
            self._open(event.format).write(event.data)

    def _open(self, form: AudioFormat) -> WavWriter:
        if self._writer is None:
            self._writer, self._empty = WavWriter(self.file, form), False
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        super().close()


class PictureFile(OutFile):
    """The first picture that comes; others are counted in the note."""

    modality = Modality.IMAGE

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        self._whole = False
        self._more = 0

    def take(self, event: Event) -> None:
        if not isinstance(event, ImageChunk):
            return
        if self._whole:
            self._more += event.last
            self.warning = f" (the first of {self._more + 1} pictures)"
            return
        self.check_type(event.mime_type)
        self.write(event.data)
        self._whole = event.last


class FilmFile(OutFile):
    """A film."""

    modality = Modality.VIDEO

    def take(self, event: Event) -> None:
        if isinstance(event, VideoChunk):
            self.check_type(event.mime_type)
            self.write(event.data)


KINDS: dict[str, type[OutFile]] = {
    ".txt": TextFile,
    ".wav": SoundFile,
    ".png": PictureFile,
    ".jpg": PictureFile,
    ".jpeg": PictureFile,
    ".webp": PictureFile,
    ".mp4": FilmFile,
}


@contextmanager
def open_outfile(path: Path) -> Iterator[OutFile]:
    """The file for an output, by its extension. Unless it was committed, nothing of it stays."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise CommandError(f"--out {path}: the extension must be one of {' '.join(KINDS)}")
    if path.is_dir():
        raise CommandError(f"--out {path}: is a directory")
    # Beside its place: a move across file systems would not be atomic.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = part.open("wb")
    except OSError as error:
        raise CommandError(f"--out {path}: cannot write there: {error.strerror}") from None
    with file:
        try:
            yield kind(path, file)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
