"""What stages give, cut into messages that fit the contract's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from omni_grpc.types import (
    Audio,
    AudioChunk,
    Content,
    Image,
    ImageChunk,
    Payload,
    TensorChunk,
    Tensors,
    TextDelta,
    TokenLogprobs,
    Video,
    VideoChunk,
)

AUDIO_BYTES = 64 << 10
"""Largest audio message."""
PART_BYTES = 512 << 10
"""Largest part of a picture, a film or an array: well under 1 MiB with all that is around it."""
TEXT_CHARACTERS = 128 << 10
"""Most characters of one text message (4 bytes each at most)."""
TOKEN_BYTES = 5
"""Most bytes of a token id in a message."""
ENTRY_BYTES = 24
"""Most bytes of a token's log-probability in a message, beside its candidates' texts."""
Item = TypeVar("Item")


class Cutter:
    """Cuts one stage's payloads into the contents of messages, and keeps count of samples, chunks
    and frames.

    The counts are of what was handed over for delivery, over all payloads of the stage.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.frames = 0
        self._chunk = 0

    def withdraw(self, content: Content) -> None:
        """A content that was cut is not delivered after all: it does not count."""
        match content:
            case AudioChunk():
                self.samples -= len(content.data) // content.format.frame_width
            case VideoChunk():
                self._chunk -= 1
                self.frames -= content.frame_count

    def cut(self, payload: Payload) -> Iterable[Content]:
        """The payload's contents in order, each within the contract's limits. To be taken once, and
        whole: what is cut counts."""
        if isinstance(payload, TextDelta):
            return cut_text(payload) if text_size(payload) > PART_BYTES else (payload,)
        return self._cut(payload)

    def _cut(self, payload: Audio | Image | Video | Tensors) -> Iterator[Content]:
        match payload:
            case Audio():
                yield from self._cut_audio(payload)
            case Image():
                for offset, data, last in _parts(payload.data, PART_BYTES):
                    yield ImageChunk(
                        data, payload.mime_type, payload.width, payload.height, offset, last
                    )
            case Video():
                yield from self._cut_video(payload)
            case Tensors():
                yield from cut_tensors(payload)

    def _cut_audio(self, audio: Audio) -> Iterator[AudioChunk]:
        width = audio.format.frame_width
        step = AUDIO_BYTES // width * width
        for _, data, _ in _parts(audio.data, step):
            if data:
                yield AudioChunk(data, self.samples, audio.format)
                self.samples += len(data) // width

    def _cut_video(self, video: Video) -> Iterator[VideoChunk]:
        for offset, data, last in _parts(video.data, PART_BYTES):
            yield VideoChunk(
                data,
                video.mime_type,
                self._chunk,
                video.first_frame,
                # The frames begin in the first part; the others carry on with its bytes.
                video.frame_count if offset == 0 else 0,
                video.width,
                video.height,
                last and video.last,
                video.active_event_ids,
            )
            self._chunk += 1
        self.frames += video.frame_count


def cut_text(delta: TextDelta) -> Iterator[TextDelta]:
    """The delta as one or more, each well under 1 MiB: log-probabilities of the prompt first; a
    token's log-probabilities stay beside its id."""
    if text_size(delta) <= PART_BYTES:
        yield delta
        return
    for entries in _batches(delta.prompt_logprobs, _entry_size):
        yield TextDelta("", prompt_logprobs=entries)
    start = 0
    for entries in _batches(delta.logprobs, lambda entry: TOKEN_BYTES + _entry_size(entry)):
        ids = delta.token_ids[start : start + len(entries)]
        yield TextDelta("", ids, entries)
        start += len(entries)
    for ids in _batches(delta.token_ids[start:], lambda _: TOKEN_BYTES):
        yield TextDelta("", ids)
    for start in range(0, len(delta.text), TEXT_CHARACTERS):
        yield TextDelta(delta.text[start : start + TEXT_CHARACTERS])


def _batches(items: list[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, in lists of at most PART_BYTES (or of one that is larger)."""
    batch: list[Item] = []
    total = 0
    for item in items:
        if batch and total + size(item) > PART_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def _entry_size(entry: TokenLogprobs) -> int:
    return ENTRY_BYTES + sum(ENTRY_BYTES + 4 * len(c.text) for c in entry.candidates)


def text_size(delta: TextDelta) -> int:
    """Most bytes that a delta takes in a message."""
    size = 4 * len(delta.text) + TOKEN_BYTES * len(delta.token_ids)
    if not delta.logprobs and not delta.prompt_logprobs:
        return size
    entries = sum(map(_entry_size, delta.logprobs)) + sum(map(_entry_size, delta.prompt_logprobs))
    return size + entries


def cut_tensors(tensors: Tensors) -> Iterator[TensorChunk]:
    """Each array in parts of whole elements."""
    for name, tensor in tensors.arrays.items():
        size = tensor.dtype.itemsize
        for offset, data, last in _parts(tensor.data, PART_BYTES // size * size):
            yield TensorChunk(name, data, tensor.dtype, tensor.shape, offset, last)


def _parts(data: bytes, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, part, whether it is the last) of `data`; one empty part where there is nothing."""
    if len(data) <= size:
        yield 0, data, True
        return
    for offset in range(0, len(data), size):
        yield offset, data[offset : offset + size], offset + size >= len(data)
