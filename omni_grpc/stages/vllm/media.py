"""Pictures, sound and film of a prompt, decoded and under keys of this replica.

vLLM's sender leaves out a tensor that it believes its engine core has, by key. So a key belongs to
one replica; and it must never mean two contents, so what a client names and what we count are kept
apart, and so are tenants and modalities (S10-S12)."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from omni_grpc import types as t
from omni_grpc.errors import InvalidField
from omni_grpc.ipc import StageSpec
from omni_grpc.stages.media import (
    Decoded,
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    load_media,
    media_policy,
    prompt_media,
)
from omni_grpc.stages.vllm.params import unsupported

BAND_ROWS = 64
"""Rows of a picture that are hashed at a time."""


@dataclass(frozen=True, slots=True)
class Item:
    """One of a prompt's media, as vLLM takes it. `modality` is vLLM's name: image, audio, video."""

    modality: str
    key: str
    data: Any


class MediaReader:
    """Reads prompts' media for one replica. `limits`: most items by modality that the model
    takes."""

    def __init__(
        self, spec: StageSpec, limits: Mapping[str, int], sample_rate: int | None = None
    ) -> None:
        self._spec = spec
        self._policy = media_policy(spec)
        self._limits = limits
        self._sample_rate = sample_rate

    async def read(self, prompt: t.Prompt, tenant: str = "") -> list[Item]:
        """The prompt's media in order, read and decoded at once, in threads.

        Raises what refuses the first one that is refused; the others are then given up."""
        found = prompt_media(prompt, self._policy)
        self._check(found)
        tasks = [asyncio.create_task(self._item(path, item, tenant)) for path, item in found]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, found: list[tuple[str, t.Media]]) -> None:
        counts: Counter[str] = Counter()
        for path, item in found:
            modality = item.modality.value
            most = self._limits.get(modality, 0)
            if not most:
                raise unsupported(path, f"stage {self._spec.stage!r} does not take {modality}")
            counts[modality] += 1
            if counts[modality] > most:
                raise InvalidField(path, f"is one more than the {most} of {modality} that fit")

    async def _item(self, path: str, media: t.Media, tenant: str) -> Item:
        decoded = await load_media(media, self._policy, path)
        name = caller_name(tenant, media) if media.uuid else None
        return await asyncio.to_thread(self._finish, media.modality, decoded, name)

    def _finish(self, modality: t.Modality, decoded: Decoded, name: str | None) -> Item:
        """The slow rest, in a thread: sound at the model's rate, the content's hash."""
        name = name or content_name(decoded)
        key = f"{self._spec.stage}:rep{self._spec.replica}:{name}"
        return Item(modality.value, key, engine_data(decoded, self._sample_rate))


def caller_name(tenant: str, media: t.Media) -> str:
    """A caller's uuid as part of a key. Never a `content_name`, whatever the caller chooses."""
    return f"{quote(tenant, safe='')}/{media.modality.value}/{media.uuid}"


def content_name(decoded: Decoded) -> str:
    """A hash of the decoded content: the same picture counts as the same from wherever it came."""
    match decoded:
        case DecodedImage(image):
            head, parts = f"image {image.mode} {image.size}", _bands(image)
        case DecodedAudio(samples, rate):
            head, parts = f"audio {rate}", iter([samples.tobytes()])
        case DecodedVideo(frames, fps):
            head, parts = f"video {frames.shape} {fps}", (frame.tobytes() for frame in frames)
    digest = hashlib.sha256(head.encode() + b"\0")
    for part in parts:
        digest.update(part)
    return f"sha256-{digest.hexdigest()}"


def _bands(image: Image.Image) -> Iterator[bytes]:
    # Pillow holds the interpreter's lock while it writes: in short parts, others get their turn.
    for top in range(0, image.height, BAND_ROWS):
        bottom = min(top + BAND_ROWS, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()


def engine_data(decoded: Decoded, sample_rate: int | None) -> Any:
    """The content in the form of vLLM's `multi_modal_data`."""
    match decoded:
        case DecodedImage(image):
            return image
        case DecodedAudio(samples, rate):
            return _at_rate(samples, rate, sample_rate)
        case DecodedVideo(frames, fps):
            return frames, _film_facts(len(frames), fps)


def _at_rate(samples: Any, rate: int, wanted: int | None) -> tuple[Any, int]:
    # Here and not in vLLM, whose resampler needs torchaudio.
    if wanted is None or wanted == rate:
        return samples, rate
    import soxr

    return soxr.resample(samples, rate, wanted).astype(np.float32), wanted


def _film_facts(count: int, fps: float) -> dict[str, Any]:
    # The names of vllm.multimodal.video's loaders. Processors sample frames by time, so only where
    # the time is known.
    return {
        "total_num_frames": count,
        "fps": fps,
        "duration": count / fps if fps else 0.0,
        "video_backend": "omni-grpc",
        "frames_indices": list(range(count)),
        "do_sample_frames": fps > 0,
    }
