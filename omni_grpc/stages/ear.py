"""The ear: Whisper, by faster-whisper. Sound in, what was said out, segment by segment.

    engine_args: {compute_type: int8, language: en, beam_size: 1, threads: 1, workers: 1}

Words beside the sound are not its business: the bridge behind it joins them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from typing import Any, ClassVar

import numpy as np
import soxr
from faster_whisper import WhisperModel
from numpy.typing import NDArray

from omni_grpc.ipc import Task
from omni_grpc.stages.media import DecodedAudio, invalid_media, load_media
from omni_grpc.stages.recognition import RecognitionStage
from omni_grpc.types import Media, Modality, StageFacts

RATE = 16_000
"""What Whisper hears, in Hz."""

Samples = NDArray[np.float32]


class EarStage(RecognitionStage[Samples]):
    """The stage of engine `whisper`."""

    modality: ClassVar = Modality.AUDIO
    nothing: ClassVar = "nothing was said in it"

    async def load(self) -> StageFacts:
        self._model: Any = await asyncio.to_thread(self._load)
        versions = {name: metadata.version(name) for name in ("faster-whisper", "ctranslate2")}
        return StageFacts(capacity=self.workers, versions=versions)

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

    async def prepare(self, task: Task) -> dict[str, Samples]:
        sounds = await super().prepare(task)
        # Each is within the limit; what counts for the model is their sum.
        if sum(len(samples) for samples in sounds.values()) > self.policy.max_audio_s * RATE:
            longest = f"{self.policy.max_audio_s:g} s"
            raise invalid_media(next(reversed(sounds)), f"is over {longest} with those before it")
        return sounds

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
