"""Where a film goes: on a terminal, two pixels per character cell, or into a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from types import TracebackType
from typing import BinaryIO, Self

import typer
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from omni_grpc_client import VideoChunk

UPPER_HALF = "▀"
ROWS_BELOW = 3
"""Rows for what is said and what is typed."""
MOST_SCALE = 3
LATE_S = 0.5
"""A frame that is later than this sets the clock anew."""


class Screen:
    """Shows raw RGB frames at the top, a line of what is said below them, and leaves the cursor to
    who types."""

    def __init__(self, fps: float) -> None:
        self._console = Console(highlight=False)
        self._frame_s = 1 / fps
        self._due = 0.0
        self._rows = 0
        self._said = ""

    def __enter__(self) -> Self:
        self._write("\x1b[2J\x1b[H")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write(f"\x1b[{self._rows + ROWS_BELOW};1H\n")

    async def show(self, chunk: VideoChunk) -> None:
        """Plays a chunk, frame by frame, at the film's pace."""
        loop = asyncio.get_running_loop()
        size = chunk.width * chunk.height * 3
        for place in range(chunk.frame_count):
            now = loop.time()
            if now - self._due > LATE_S:
                self._due = now
            await asyncio.sleep(max(0.0, self._due - now))
            self._due += self._frame_s
            frame = chunk.data[place * size : (place + 1) * size]
            self._draw(frame, chunk.width, chunk.height)

    def say(self, text: str) -> None:
        """Says something below the film, and clears the line that was typed."""
        self._said = text
        if self._rows:
            self._below()

    def _draw(self, frame: bytes, width: int, height: int) -> None:
        columns, rows = self._console.size
        scale = max(1, min(columns // width, (rows - ROWS_BELOW) * 2 // height, MOST_SCALE))
        drawn = self._rendered(Segments(half_blocks(frame, width, height, scale)))
        if not self._rows:
            self._rows = -(-height * scale // 2)
            self._below()
        # What is typed meanwhile stays where it is.
        self._write(f"\x1b7\x1b[H{drawn}\x1b8")

    def _below(self) -> None:
        row = self._rows + 1
        self._write(f"\x1b[{row};1H\x1b[J{self._said}\x1b[{row + 1};1H> ")

    def _rendered(self, segments: Segments) -> str:
        with self._console.capture() as captured:
            self._console.print(segments, end="")
        return captured.get()

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def half_blocks(frame: bytes, width: int, height: int, scale: int = 1) -> Iterator[Segment]:
    """Pixels [height, width, 3] as rows of character cells, each pixel `scale` cells wide. Below an
    odd last row it is black."""
    step = width * 3
    rows = [frame[at : at + step] for at in range(0, len(frame), step)]
    rows = [row for row in rows for _ in range(scale)]
    if len(rows) % 2:
        rows.append(bytes(step))
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        cells = [(upper[at : at + 3], lower[at : at + 3]) for at in range(0, step, 3)]
        for (above, below), run in groupby(cells):
            yield Segment(UPPER_HALF * scale * len(list(run)), _style(above, below))
        yield Segment.line()


@lru_cache(maxsize=1 << 14)
def _style(above: bytes, below: bytes) -> Style:
    return Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below))


class FilmFile:
    """An mp4 file that is whole after every chunk."""

    def __init__(self, file: BinaryIO, quiet: bool) -> None:
        self._file = file
        self._quiet = quiet

    async def show(self, chunk: VideoChunk) -> None:
        """Appends a chunk."""
        # A few kilobytes into the page cache: no thread is worth that.
        self._file.write(chunk.data)
        self._file.flush()

    def say(self, text: str) -> None:
        """Says something on stderr."""
        if not self._quiet:
            typer.echo(text, err=True)
