"""The ear: Whisper, by faster-whisper. Sound in, what was said out, segment by segment.

    engine_args: {compute_type: int8, language: en, beam_size: 1, threads: 1, workers: 1}

Words beside the sound are not its business: the bridge behind it joins them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from importlib import metadata
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import soxr
from faster_whisper import WhisperModel
from numpy.typing import NDArray

from omni_grpc.errors import NotSupported, Violation
from omni_grpc.ipc import Feed, Task
from omni_grpc.stages.base import Inputs, segments
from omni_grpc.stages.media import DecodedAudio, invalid_media, load_media, prompt_media
from omni_grpc.stages.recognition import RecognitionStage, refuse_params
from omni_grpc.types import (
    Audio,
    AudioEncoding,
    Finish,
    FinishReason,
    Media,
    Modality,
    StageFacts,
    StageOutput,
    TextDelta,
)

RATE = 16_000
"""What Whisper hears, in Hz."""

Samples = NDArray[np.float32]


class EarStage(RecognitionStage[Samples]):
    """The stage of engine `whisper`.

    A resumable task hears what a client sends as it is said: chunks of PCM, and whole sounds, up to
    a segment's end. A segment in which nothing was said is answered with nothing."""

    modality: ClassVar = Modality.AUDIO
    nothing: ClassVar = "nothing was said in it"

    async def load(self) -> StageFacts:
        self._model: Any = await asyncio.to_thread(self._load)
        versions = {name: metadata.version(name) for name in ("faster-whisper", "ctranslate2")}
        return StageFacts(capacity=self.workers, versions=versions, resumable=True)

    def _load(self) -> WhisperModel:
        model = WhisperModel(
            self.spec.model,
            device="cuda" if self.spec.device.startswith("cuda") else "cpu",
            compute_type=str(self.spec.engine_args.get("compute_type", "int8")),
            cpu_threads=self.threads,
            num_workers=self.workers,
            local_files_only=True,
        )
        segments, _ = model.transcribe(np.zeros(RATE, np.float32), language="en", beam_size=1)
        list(segments)
        return model

    async def prepare(self, task: Task) -> Sounds:
        if task.resumable:
            refuse_params(task)
            return Hearing()
        sounds = await super().prepare(task)
        # Each is within the limit; what counts for the model is their sum.
        if sum(len(samples) for samples in sounds.values()) > self.policy.max_audio_s * RATE:
            longest = f"{self.policy.max_audio_s:g} s"
            raise invalid_media(next(reversed(sounds)), f"is over {longest} with those before it")
        return sounds

    async def prepare_update(self, task: Task, prepared: Sounds, feed: Feed) -> None:
        assert isinstance(prepared, Hearing)
        found: list[Audio | Samples] = []
        if isinstance(feed.payload, TextDelta):
            description = "the stage hears, it does not read"
            violation = Violation("chunk.text", description)
            raise NotSupported(f"chunk.text: {description}", violations=(violation,))
        if isinstance(feed.payload, Audio):
            found.append(feed.payload)
        elif feed.prompt is not None:
            for path, media in prompt_media(feed.prompt, self.policy):
                found.append(await self.decode(media, path))
        if prepared.seconds(found) > self.policy.max_audio_s:
            raise invalid_media("prompt.audio", f"makes over {self.policy.max_audio_s:g} s")
        prepared.add(found, end_of_segment=feed.end_of_segment)

    async def run(self, task: Task, prepared: Sounds, inputs: Inputs) -> AsyncIterator[StageOutput]:
        if not isinstance(prepared, Hearing):
            async for output in super().run(task, prepared, inputs):
                yield output
            return
        async for segment in segments(inputs):
            async for feed in segment:
                if feed.number is None:
                    # Given again after an interrupt: it was checked then.
                    await self.prepare_update(task, prepared, feed)
            if segment.closed:
                samples = await asyncio.to_thread(prepared.take)
                async for piece in self.pieces(samples):
                    yield StageOutput(TextDelta(piece))
                yield StageOutput(finish=Finish(FinishReason.COMPLETE), segment_end=True)

    async def decode(self, media: Media, path: str) -> Samples:
        sound = await load_media(media, self.policy, path)
        assert isinstance(sound, DecodedAudio)
        if sound.rate == RATE:
            return sound.samples
        return await asyncio.to_thread(soxr.resample, sound.samples, sound.rate, RATE)

    def recognize(self, item: Samples) -> Iterator[str]:
        arguments = self.spec.engine_args
        segments, _ = self._model.transcribe(
            item,
            language=str(arguments.get("language", "en")),
            beam_size=int(arguments.get("beam_size", 1)),
            # Whisper makes words of silence; what holds no voice is not given to it.
            vad_filter=True,
        )
        first = True
        for segment in segments:
            # A line's end would be a word to the next stage, and two of them another medium.
            if text := " ".join(segment.text.split()):
                yield text if first else f" {text}"
                first = False


class Hearing(dict[str, Samples]):
    """What is heard of a conversation, segment by segment: sounds in pieces of any size. The same
    sound in any cutting gives the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[Audio | Samples] = []
        self._closed: deque[list[Audio | Samples]] = deque()

    def seconds(self, more: Iterable[Audio | Samples]) -> float:
        """Length of the open segment with `more` behind it."""
        return sum(map(_seconds, self._open)) + sum(map(_seconds, more))

    def add(self, pieces: Iterable[Audio | Samples], *, end_of_segment: bool) -> None:
        """The next pieces of the open segment."""
        self._open += pieces
        if end_of_segment:
            self._closed.append(self._open)
            self._open = []

    def take(self) -> Samples:
        """The samples of the oldest segment that is closed. Takes time: not for the event loop."""
        parts: list[Samples] = []
        for is_pcm, pieces in groupby(self._closed.popleft(), lambda p: isinstance(p, Audio)):
            if is_pcm:
                parts.append(_samples([p for p in pieces if isinstance(p, Audio)]))
            else:
                parts += (p for p in pieces if not isinstance(p, Audio))
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


Sounds = dict[str, Samples]


def _seconds(piece: Audio | Samples) -> float:
    if isinstance(piece, Audio):
        return len(piece.data) / piece.format.frame_width / piece.format.sample_rate_hz
    return len(piece) / RATE


def _samples(pieces: list[Audio]) -> Samples:
    """PCM of one format, in pieces, as what the model hears: mono, at RATE."""
    data, form = b"".join(piece.data for piece in pieces), pieces[0].format
    if form.encoding is AudioEncoding.PCM_S16LE:
        values = np.frombuffer(data, "<i2").astype(np.float32) / 32768
    else:
        values = np.nan_to_num(np.frombuffer(data, "<f4")).clip(-1, 1)
    mono: Samples = values.reshape(-1, form.channels).mean(axis=1, dtype=np.float32)
    if form.sample_rate_hz == RATE:
        return mono
    resampled: Samples = soxr.resample(mono, form.sample_rate_hz, RATE)
    return resampled
