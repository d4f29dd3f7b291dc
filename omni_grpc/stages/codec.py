"""Speech in two stages: the talker (text → acoustic frames, clause by clause) and the decoder
(frames → samples).

Both work on whatever has come so far: the first clause is heard while later text is still being
written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import numpy as np

from omni_grpc.errors import NotSupported
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.params import check_honoured
from omni_grpc.stages.base import Inputs, Stage, segments
from omni_grpc.stages.voice.acoustic import FRAME_RATE, SAMPLE_RATE, Acoustic, Frames
from omni_grpc.stages.voice.clauses import ClauseSplitter
from omni_grpc.stages.voice.vocoder import Samples, Vocoder, VocoderStream, to_pcm16
from omni_grpc.types import (
    Audio,
    AudioEncoding,
    AudioFormat,
    CodecParams,
    DataType,
    Finish,
    FinishReason,
    Prompt,
    StageFacts,
    StageOutput,
    Tensor,
    Tensors,
    Text,
    TextDelta,
)

VOICE = "heart"
BLOCK_FRAMES = 40
"""Frames that are decoded at a time: requests that run at once take turns this often."""


class _Codec(Stage[CodecParams]):
    """What both stages share: a pool of threads for the model, and one kind of parameters."""

    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The parameters that it honours, with their choices."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self._threads = int(spec.engine_args.get("threads", 1))
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix=spec.stage)

    async def prepare(self, task: Task) -> CodecParams:
        params = task.params if isinstance(task.params, CodecParams) else CodecParams()
        check_honoured(params, self.takes, "params")
        return params

    async def prepare_update(self, task: Task, prepared: CodecParams, feed: Feed) -> None:
        if isinstance(feed.params, CodecParams):
            check_honoured(feed.params, self.takes, "params")
        if feed.prompt is not None:
            _prompt_text(feed.prompt)

    async def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


class TalkerStage(_Codec):
    """Text in, acoustic frames out: one Tensors per utterance, with its `boundary` set."""

    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"voice": (VOICE,), "speed": ()}

    async def load(self) -> StageFacts:
        loop = asyncio.get_running_loop()
        self._acoustic = await loop.run_in_executor(None, Acoustic, Path(self.spec.model))
        await loop.run_in_executor(self._executor, self._acoustic.speak, "Warm up.")
        versions = {"hibari-tts": metadata.version("hibari-tts")}
        return StageFacts(versions=versions, params=dict(self.takes), resumable=True)

    async def prepare(self, task: Task) -> CodecParams:
        params = await super().prepare(task)
        if task.prompt is not None:
            _prompt_text(task.prompt)
        return params

    async def run(
        self, task: Task, prepared: CodecParams, inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        async for segment in segments(inputs):
            splitter, params = ClauseSplitter(), prepared
            if not await segment.begun() and task.resumable:
                continue
            if isinstance(segment.params, CodecParams):
                params = segment.params
            clauses = splitter.push(_prompt_text(task.prompt)) if task.prompt else []
            async for output in self._speak(clauses, params):
                yield output
            async for feed in segment:
                async for output in self._speak(splitter.push(_feed_text(feed)), params):
                    yield output
            async for output in self._speak(splitter.flush(), params):
                yield output
            yield StageOutput(finish=Finish(FinishReason.COMPLETE), segment_end=task.resumable)

    async def _speak(self, clauses: list[str], params: CodecParams) -> AsyncIterator[StageOutput]:
        loop, speed = asyncio.get_running_loop(), params.speed or 1.0
        for clause in clauses:
            utterances = await loop.run_in_executor(
                self._executor, partial(self._acoustic.speak, clause, speed=speed)
            )
            for number, frames in enumerate(utterances):
                # A clause that is spoken in several pieces: its words go with the first.
                yield StageOutput(pack_frames(frames, "" if number else clause))


class DecoderStage(_Codec):
    """Acoustic frames in, sound out. The same frames and seed give the same samples, however they
    came."""

    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "seed": (),
        "encoding": tuple(e.value for e in AudioEncoding),
    }

    async def load(self) -> StageFacts:
        loop = asyncio.get_running_loop()
        self._vocoder = await loop.run_in_executor(None, Vocoder, Path(self.spec.model))
        return StageFacts(
            output_format=AudioFormat(SAMPLE_RATE),
            versions={"onnxruntime": metadata.version("onnxruntime")},
            params=dict(self.takes),
            resumable=True,
        )

    async def prepare(self, task: Task) -> CodecParams:
        params = await super().prepare(task)
        if task.prompt is not None:
            raise NotSupported("the decoder takes a talker's frames, not prompts")
        return params

    async def run(
        self, task: Task, prepared: CodecParams, inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        encoding = AudioEncoding(prepared.encoding or AudioEncoding.PCM_S16LE.value)
        stream = self._vocoder.stream(prepared.seed or 0)
        async for segment in segments(inputs):
            if not await segment.begun() and task.resumable:
                continue
            if isinstance(segment.params, CodecParams) and segment.params.seed is not None:
                stream = self._vocoder.stream(segment.params.seed)
            async for feed in segment:
                async for samples in self._decode(stream, feed):
                    yield StageOutput(
                        Audio(
                            _encode(samples, encoding), AudioFormat(SAMPLE_RATE, encoding=encoding)
                        )
                    )
            yield StageOutput(finish=Finish(FinishReason.COMPLETE), segment_end=task.resumable)

    async def _decode(self, stream: VocoderStream, feed: Feed) -> AsyncIterator[Samples]:
        """The samples that are final after this Feed; block by block, so that requests take
        turns."""
        if not isinstance(feed.payload, Tensors):
            return
        loop = asyncio.get_running_loop()
        for frames in _blocks(unpack_frames(feed.payload)):
            samples = await loop.run_in_executor(self._executor, stream.push, frames)
            if samples.size:
                yield samples
        if feed.payload.boundary:
            samples = await loop.run_in_executor(self._executor, stream.end_utterance)
            if samples.size:
                yield samples


def pack_frames(frames: Frames, spoken: str = "") -> Tensors:
    """An utterance's frames: conditioning [130, F] and f0 [F], float32; and its words."""
    arrays = {"conditioning": frames.conditioning, "f0": frames.f0}
    return Tensors(
        {
            name: Tensor(array.astype("<f4").tobytes(), DataType.FLOAT32, array.shape)
            for name, array in arrays.items()
        },
        boundary=True,
        spoken=spoken,
        duration_ms=frames.f0.shape[0] * 1e3 / FRAME_RATE,
    )


def unpack_frames(tensors: Tensors) -> Frames:
    """The frames that `pack_frames` packed."""
    arrays = {
        name: np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
        for name, tensor in tensors.arrays.items()
    }
    return Frames(arrays["conditioning"], arrays["f0"])


def _blocks(frames: Frames) -> list[Frames]:
    starts = range(0, frames.f0.shape[0], BLOCK_FRAMES)
    return [
        Frames(frames.conditioning[:, s : s + BLOCK_FRAMES], frames.f0[s : s + BLOCK_FRAMES])
        for s in starts
    ]


def _encode(samples: np.ndarray, encoding: AudioEncoding) -> bytes:
    if encoding is AudioEncoding.PCM_F32LE:
        return samples.astype("<f4").tobytes()
    return to_pcm16(samples)


def _feed_text(feed: Feed) -> str:
    if feed.prompt is not None:
        return _prompt_text(feed.prompt)
    return feed.payload.text if isinstance(feed.payload, TextDelta) else ""


def _prompt_text(prompt: Prompt) -> str:
    if not isinstance(prompt.content, Text):
        raise NotSupported("the talker speaks text only")
    return prompt.content.text
