"""A stage without a model: scripted timing, outputs and faults. A real stage in every other way.

What it makes follows the stage's `modality` (engine argument): text echoes the prompt word by word,
audio gives one tone per word that it hears, image one picture of everything. A script
(`FakeScript`) overrides how many outputs come, when, how large they are, and what goes wrong.

With the engine argument `interactive` each output is a chunk, at whose border events apply: any
prompt and any parameters, of which `reject: true` rejects the event and `encode_ms` makes it slow
to make ready. They change nothing of what is given."""

from __future__ import annotations

import asyncio
import io
import math
import os
import signal
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from omni_grpc.errors import InvalidField, StageError
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.params import MAX_FAKE_MS, FakeScript, parse_fake_script
from omni_grpc.stages.base import Inputs, Segment, Stage, segments
from omni_grpc.stages.steering import Steering, Track
from omni_grpc.types import (
    Audio,
    AudioFormat,
    CustomParams,
    EventChange,
    Finish,
    FinishReason,
    Image,
    ImageFormat,
    InteractionEvent,
    Messages,
    Modality,
    Payload,
    Prompt,
    StageFacts,
    StageOutput,
    Tensor,
    Text,
    TextDelta,
    TokenIds,
    Usage,
)

AUDIO_FORMAT = AudioFormat(sample_rate_hz=24000)
TONE_SAMPLES = 2400
PICTURE_SIZE = 32


@dataclass(frozen=True, slots=True)
class FakeJob:
    """A task's script, and the events that come while it runs."""

    script: FakeScript
    track: Track[None]
    chunks: Iterator[int] = field(default_factory=count)


class FakeStage(Stage[FakeJob]):
    """The stage of engine `fake`."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self._modality = Modality(spec.engine_args.get("modality", "text"))
        self._load_s = float(spec.engine_args.get("load_s", 0.0))
        self._interactive = bool(spec.engine_args.get("interactive", False))

    async def load(self) -> StageFacts:
        await asyncio.sleep(self._load_s)
        form: AudioFormat | ImageFormat | None = None
        match self._modality:
            case Modality.AUDIO:
                form = AUDIO_FORMAT
            case Modality.IMAGE:
                form = ImageFormat("image/png", PICTURE_SIZE, PICTURE_SIZE)
        return StageFacts(output_format=form, resumable=True, interactive=self._interactive)

    async def prepare(self, task: Task) -> FakeJob:
        values = task.params.values if isinstance(task.params, CustomParams) else {}
        script = parse_fake_script(values)
        if script.prepare_ms:
            await asyncio.sleep(script.prepare_ms / 1e3)
        if script.prepare_fail:
            raise InvalidField("params.prepare_fail", "the script refuses the request")
        if task.prompt is not None and not task.streaming and not prompt_words(task.prompt):
            raise InvalidField("prompt", "holds no word")
        return FakeJob(script, Track(None))

    async def steer(
        self, task: Task, prepared: FakeJob, event: InteractionEvent
    ) -> list[EventChange]:
        if not self._interactive:
            return await super().steer(task, prepared, event)
        parameters = event.parameters or {}
        encode_ms = parameters.get("encode_ms", 0.0)
        if not isinstance(encode_ms, (int, float)) or not 0 <= encode_ms <= MAX_FAKE_MS:
            path = "event.parameters.encode_ms"
            raise InvalidField(path, f"must be from 0 to {MAX_FAKE_MS:g}")
        await asyncio.sleep(encode_ms / 1e3)
        if parameters.get("reject"):
            raise InvalidField("event.parameters.reject", "the event asks for it")
        return prepared.track.submit(Steering(event.event_id, None, event.transition_chunks))

    async def run(
        self, task: Task, prepared: FakeJob, inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        await asyncio.sleep(prepared.script.first_ms / 1e3)
        async for segment in segments(inputs):
            script, given, words = prepared.script, 0, 0
            if task.resumable and not await segment.begun():
                continue
            if isinstance(segment.params, CustomParams):
                script = parse_fake_script(segment.params.values)
            async for payload in self._answer(task, script, segment):
                if given and script.interval_ms:
                    await asyncio.sleep(script.interval_ms / 1e3)
                await self._break(script, given)
                given += 1
                _, changes = prepared.track.border(next(prepared.chunks), None)
                for change in changes:
                    yield StageOutput(event=change)
                yield StageOutput(payload)
            await self._break(script, given)
            words = len(prompt_words(task.prompt)) if task.prompt else given
            yield self._end(words, given, segment_end=task.resumable)
        for change in prepared.track.end():
            yield StageOutput(event=change)

    def _end(self, words: int, count: int, *, segment_end: bool) -> StageOutput:
        if self._modality is Modality.TEXT:
            usage = Usage(prompt_tokens=words, completion_tokens=count)
            return StageOutput(
                finish=Finish(FinishReason.STOP), usage=usage, segment_end=segment_end
            )
        return StageOutput(finish=Finish(FinishReason.COMPLETE), segment_end=segment_end)

    async def _answer(
        self, task: Task, script: FakeScript, segment: Segment
    ) -> AsyncIterator[Payload]:
        if script.outputs is not None:
            for number in range(script.outputs):
                yield self._make(f"word{number} ", script)
            if task.resumable:
                # A script may be done before its segment is closed; the answer ends with it.
                async for _ in segment:
                    pass
            return
        if self._modality is Modality.AUDIO:
            async for feed in segment:
                for word in feed_words(feed):
                    yield self._make(word, script)
            return
        heard = "".join(prompt_words(task.prompt)) if task.prompt is not None else ""
        async for feed in segment:
            heard += "".join(feed_words(feed))
        if self._modality is Modality.IMAGE:
            yield self._make(heard, script)
            return
        # Words are cut only when all text is there, so that chunks of it cannot show.
        for word in split_words(heard):
            yield self._make(word, script)

    def _make(self, word: str, script: FakeScript) -> Payload:
        match self._modality:
            case Modality.AUDIO:
                return Audio(tone(word, script.bytes), AUDIO_FORMAT)
            case Modality.IMAGE:
                return picture(word, script.bytes)
        text = (
            word
            if script.bytes is None
            else (word * (script.bytes // len(word) + 1))[: script.bytes]
        )
        return TextDelta(text, [sum(text.encode()[:64]) % 1000])

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        """Knows what the contract knows, and does nothing; a scripted replica fails at it."""
        if command not in ("reset_cache", "sleep", "wake"):
            await super().control(command, arguments)
        if self.spec.replica in self.spec.engine_args.get("control_fails_on", ()):
            raise RuntimeError("the script fails control calls")

    async def _break(self, script: FakeScript, count: int) -> None:
        if count == script.fail_at:
            raise StageError(f"stage {self.spec.stage!r} failed")
        if count == script.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if count == script.hang_at:
            await asyncio.Event().wait()


def split_words(text: str) -> Iterator[str]:
    """Words with the space behind them, so that they join to the text again."""
    start = 0
    for place, character in enumerate(text):
        if character.isspace() and not text[place + 1 : place + 2].isspace():
            yield text[start : place + 1]
            start = place + 1
    if start < len(text):
        yield text[start:]


def feed_words(feed: Feed) -> list[str]:
    """The words of a Feed: of a prompt or of a text."""
    if feed.prompt is not None:
        return prompt_words(feed.prompt)
    return list(split_words(feed.payload.text)) if isinstance(feed.payload, TextDelta) else []


def prompt_words(prompt: Prompt) -> list[str]:
    """What a fake text stage echoes: the text's words, the ids as numbers, the last message's
    words."""
    match prompt.content:
        case Text(text):
            return list(split_words(text))
        case TokenIds(ids):
            return [f"{token} " for token in ids]
        case Messages(messages):
            parts = (part.text for part in messages[-1].parts if isinstance(part, Text))
            return list(split_words(" ".join(parts)))
        case Tensor(shape=shape):
            return [f"{length} " for length in shape]
    return [f"{media.modality.value} " for media in prompt.media]


def tone(word: str, size: int | None) -> bytes:
    """A sine of 0.1 s (or of `size` bytes, rounded up to a sample), its pitch from the word's
    letters."""
    samples = TONE_SAMPLES if size is None else -(-size // 2)
    hertz = 200 + sum(word.encode()) % 400
    period = [
        int(8000 * math.sin(2 * math.pi * hertz * n / AUDIO_FORMAT.sample_rate_hz))
        for n in range(min(samples, TONE_SAMPLES))
    ]
    data = struct.pack(f"<{len(period)}h", *period)
    return (data * (samples // max(1, len(period)) + 1))[: samples * 2]


def picture(text: str, size: int | None) -> Image:
    """A one-coloured PNG, its colour from the text; or `size` bytes that are no picture, to test
    transport."""
    if size is not None:
        data = (text.encode() or b"x") * (size // max(1, len(text.encode())) + 1)
        return Image(data[:size], "application/octet-stream", PICTURE_SIZE, PICTURE_SIZE)
    from PIL import Image as Pillow

    seed = sum(text.encode())
    file = io.BytesIO()
    colour = (seed % 256, seed * 7 % 256, seed * 13 % 256)
    Pillow.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), colour).save(file, "PNG")
    return Image(file.getvalue(), "image/png", PICTURE_SIZE, PICTURE_SIZE)
