"""What stages give and hand on: text, sound, pictures, film, arrays."""

from __future__ import annotations

from enum import Enum

import msgspec

from omni_grpc.types.media import AudioFormat, Tensor


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    COMPLETE = "complete"
    REPETITION = "repetition"


class CandidateLogprob(msgspec.Struct, frozen=True):
    """A token that could have been taken."""

    token_id: int
    logprob: float
    rank: int = 0
    text: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one token; rank 1 is the most likely, 0 not known."""

    token_id: int
    logprob: float
    rank: int = 0
    candidates: tuple[CandidateLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, tag=True, gc=False):
    """New text and the tokens that it came from."""

    text: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class Audio(msgspec.Struct, frozen=True, tag=True):
    """Whole samples of sound."""

    data: bytes
    format: AudioFormat


class Image(msgspec.Struct, frozen=True, tag=True):
    """A whole picture file."""

    data: bytes
    mime_type: str
    width: int
    height: int


class Video(msgspec.Struct, frozen=True, tag=True):
    """The next part of a film; `active_event_ids` are in force in it."""

    data: bytes
    mime_type: str
    first_frame: int
    frame_count: int
    width: int
    height: int
    last: bool = False
    active_event_ids: tuple[str, ...] = ()


class Tensors(msgspec.Struct, frozen=True, tag=True):
    """Named arrays. `boundary`: a unit (an utterance, say) ends with them. `spoken`: the words that
    they stand for, if they are speech, and how long those take."""

    arrays: dict[str, Tensor]
    boundary: bool = False
    spoken: str = ""
    duration_ms: float = 0.0


Payload = TextDelta | Audio | Image | Video | Tensors


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Steps done of all steps (0: not known), with a preview if one was asked for."""

    step: int
    total_steps: int = 0
    preview: Image | None = None


class Finish(msgspec.Struct, frozen=True):
    """Why one answer ended; `stopped_by` is the stop string or token, if one did."""

    reason: FinishReason
    stopped_by: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What a stage used for a request: tokens, samples per channel, frames, denoise steps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_samples: int = 0
    frames: int = 0
    steps: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.audio_samples + other.audio_samples,
            self.frames + other.frames,
            self.steps + other.steps,
        )
