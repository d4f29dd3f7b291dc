"""Films in files, written while they arrive."""

from __future__ import annotations

from os import PathLike
from types import TracebackType
from typing import Self

from omni_grpc_client.events import VideoChunk
from omni_grpc_client.media import check_film


class VideoWriter:
    """Writes a film to a file as it comes, `with VideoWriter("film.mp4") as writer`. The file is
    whole after every chunk, whatever happens then."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = path
        self.frames = 0
        """Number of frames that were written."""
        self._file = open(path, "wb")  # noqa: SIM115 - `close` closes it

    def write(self, chunk: VideoChunk) -> None:
        """Appends the next chunk. Raises ValueError for raw frames, which are no file, and where
        the path names another type."""
        check_film(self.path, chunk.mime_type)
        self._file.write(chunk.data)
        self._file.flush()
        self.frames += chunk.frame_count

    def close(self) -> None:
        """Closes the file. Idempotent."""
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
