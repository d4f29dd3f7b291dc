"""What a stage says: outputs, facts, load; and the events that steer it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from omni_grpc.errors import ErrorRecord
from omni_grpc.types.media import AudioFormat, ImageFormat, Media, VideoFormat
from omni_grpc.types.payload import Finish, Payload, Progress, Usage


class EventState(Enum):
    """Where an event is in its life."""

    QUEUED = "queued"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    STARTED = "started"
    COMPLETED = "completed"

    @property
    def terminal(self) -> bool:
        """Whether nothing comes after it."""
        return self not in (EventState.QUEUED, EventState.STARTED)


class EventChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of an event; `chunk` is the one that it concerns, `error` why it was rejected."""

    event_id: str
    state: EventState
    chunk: int | None = None
    error: ErrorRecord | None = None


class InteractionEvent(msgspec.Struct, frozen=True):
    """A change to a running generation; at least one of prompt, negative prompt, media,
    parameters."""

    event_id: str
    prompt: str | None = None
    negative_prompt: str | None = None
    media: tuple[Media, ...] = ()
    parameters: dict[str, Any] | None = None
    transition_chunks: int = 3


class StageOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One thing that a stage gives: content, progress, the end of one answer or of a segment, or
    usage."""

    payload: Payload | None = None
    index: int = 0
    segment: int = 0
    progress: Progress | None = None
    finish: Finish | None = None
    segment_end: bool = False
    usage: Usage | None = None
    event: EventChange | None = None


class StageFacts(msgspec.Struct, frozen=True):
    """What a loaded stage tells of itself. `params`: the parameters that it honours, each with its
    choices if it has some; None: the stage judges for itself. `resumable`: it takes segments.
    `interactive`: it takes events."""

    output_format: AudioFormat | ImageFormat | VideoFormat | None = None
    context_tokens: int = 0
    capacity: int | None = None
    versions: dict[str, str] = {}
    params: dict[str, tuple[str, ...]] | None = None
    resumable: bool = False
    interactive: bool = False


class StageStatistics(msgspec.Struct, frozen=True):
    """A stage's own view of its load; None is not known. `counters` count from the stage's start,
    by names of its own."""

    waiting: int | None = None
    work_left: float | None = None
    kv_cache_use: float | None = None
    counters: dict[str, int] = {}
