"""What a call shows: text or JSON on stdout, progress and the summary on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import typer
from rich import progress as bars
from rich.console import Console

from omni_grpc_client import (
    AudioChunk,
    Event,
    Finished,
    ImageChunk,
    OmniCallError,
    Progress,
    SessionItem,
    TextDelta,
    VideoChunk,
)


class Display:
    """Shows one call's events as they come."""

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self._json = json
        self._records = Records(shown=json)
        self._quiet = quiet
        self._bars = Bars(shown=not quiet and not json)
        self._summary = Summary()
        self._line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
        self._end_line()
        self._records.__exit__(kind, error, trace)

    def show(self, event: Event) -> None:
        """Shows an event."""
        self._summary.count(event)
        if self._json:
            self._records.show(event)
            return
        match event:
            case TextDelta(text=text, index=0) if text:
                self._bars.stop()
                self._print(text)
                self._line_open = not text.endswith("\n")
            case Progress():
                # A bar is drawn from the line's start: over the text, were the line not ended.
                self._end_line(only_on_terminal=True)
                self._bars.show(event)

    def note(self, text: str) -> None:
        """Says something on stderr."""
        if not self._quiet:
            self._bars.stop()
            self._end_line()
            typer.echo(text, err=True)

    def finish(self) -> None:
        """Ends the text's line and says the summary."""
        self._bars.stop()
        self._end_line()
        if text := str(self._summary):
            self.note(text)

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _end_line(self, *, only_on_terminal: bool = False) -> None:
        if self._line_open and (sys.stdout.isatty() or not only_on_terminal):
            self._print("\n")
            self._line_open = False


class Bars:
    """One progress bar per stage, on a terminal; they vanish when they stop."""

    def __init__(self, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._shown = shown and console.is_terminal
        self._progress = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._running = False

    def show(self, event: Progress) -> None:
        """Moves the stage's bar."""
        if not self._shown:
            return
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._progress.add_task(event.stage, total=None)
        total = event.total_steps or None
        self._progress.update(self._tasks[event.stage], completed=event.step, total=total)
        self._progress.start()
        self._running = True

    def stop(self) -> None:
        """Takes the bars away; the next event brings them back."""
        if self._running:
            self._progress.stop()
            self._running = False


class Summary:
    """Figures of one call, as the client saw it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: dict[str, float] = {}
        self._seconds = 0.0
        self._finished: Finished | None = None

    def count(self, event: Event) -> None:
        """Takes an event into account."""
        match event:
            case TextDelta():
                self._came("text")
            case AudioChunk():
                self._came("audio")
                self._seconds += event.samples / event.format.sample_rate_hz
            case Finished():
                self._finished = event
            case ImageChunk():
                self._came("picture")
            case VideoChunk():
                self._came("film")

    def _came(self, what: str) -> None:
        self._first.setdefault(what, time.perf_counter() - self._started)

    def __str__(self) -> str:
        parts = []
        if self._finished is not None and (tokens := self._finished.usage.completion_tokens):
            parts.append(f"{tokens} tokens")
        if self._seconds:
            parts.append(f"{self._seconds:.2f} s of audio")
        parts += [f"first {what} after {s * 1e3:.0f} ms" for what, s in self._first.items()]
        parts.append(f"{time.perf_counter() - self._started:.2f} s in all")
        return " · ".join(parts)


class Records:
    """What comes as JSON on stdout, an object per line; the last is the error that ended it, if one
    did."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OmniCallError):
            self._print({"event": "Error", **_plain(error)})

    def show(self, item: SessionItem) -> None:
        """Shows an event, or what a session says beside them."""
        self._print({"event": type(item).__name__, **_plain(item)})

    def _print(self, record: dict[str, Any]) -> None:
        if self._shown:
            sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
            sys.stdout.flush()


ERROR_FIELDS = ("code", "reason", "message", "violations", "retry_after", "request_id", "pod")


def _plain(value: Any) -> Any:
    """A value for JSON: of bytes the size only, in the name of their field."""
    if isinstance(value, OmniCallError):
        return {name: _plain(getattr(value, name)) for name in ERROR_FIELDS}
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            f"{name}_bytes" if isinstance(one, bytes) else name: _plain(one)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return len(value) if isinstance(value, bytes) else value
