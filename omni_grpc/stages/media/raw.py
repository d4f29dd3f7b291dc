"""Content without a file format: 16-bit samples, and tensors that are decoded already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_grpc.config import MediaPolicy
from omni_grpc.stages.media.container import MAX_RATE, check_rate, joined
from omni_grpc.stages.media.decoded import (
    Decoded,
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    Unfit,
    check_decoded_bytes,
    check_pixels,
)
from omni_grpc.stages.media.image import flatten
from omni_grpc.stages.media.mime import MimeType
from omni_grpc.types import DataType, Modality, Tensor

BLOCK_SAMPLES = 1 << 16
MAX_CHANNELS = 32
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def decode_pcm(data: bytes, mime: MimeType, policy: MediaPolicy) -> DecodedAudio:
    """Samples as `audio/L16;rate=16000;channels=1` describes them.

    Little-endian, as all samples of this contract, unless `endianness=big-endian` says otherwise
    (RFC 4856 meant big-endian; what speech services and their clients send is little-endian).
    """
    rate, channels = mime.integer("rate"), mime.integer("channels", 1)
    if channels > MAX_CHANNELS:
        raise ValueError(f"needs channels of at most {MAX_CHANNELS}")
    if not data or len(data) % (2 * channels):
        raise Unfit(f"has {len(data)} bytes, which are no whole samples of {channels} channel(s)")
    order = ">i2" if mime.params.get("endianness") == "big-endian" else "<i2"
    return _sound(np.frombuffer(data, order).reshape(-1, channels), 32768.0, rate, policy)


def decode_tensor(
    tensor: Tensor, modality: Modality, mime: MimeType, policy: MediaPolicy
) -> Decoded:
    """Decoded content. Raises Unfit; ValueError where the MIME type lacks the rate."""
    match modality, tensor.dtype, len(tensor.shape):
        case Modality.AUDIO, DataType.FLOAT32, 1:
            samples = np.frombuffer(tensor.data, "<f4").reshape(-1, 1)
            return _sound(samples, 1.0, mime.integer("rate"), policy)
        case Modality.IMAGE, DataType.UINT8, 3:
            return _picture(tensor, policy)
        case Modality.VIDEO, DataType.UINT8, 4:
            return _film(tensor, mime, policy)
    raise Unfit(
        "is none of: picture [height, width, channels] uint8, sound [samples] float32, "
        "film [frames, height, width, 3] uint8"
    )


def _sound(
    samples: NDArray[np.generic], scale: float, rate: int, policy: MediaPolicy
) -> DecodedAudio:
    """Sound from [n, channels], block by block: the limits hold before the memory is there."""
    check_rate(rate)
    if len(samples) > policy.max_audio_s * rate:
        raise Unfit(f"is longer than {policy.max_audio_s:g} s")
    starts = range(0, len(samples), BLOCK_SAMPLES)
    blocks = (
        (samples[start : start + BLOCK_SAMPLES].astype(np.float32) / scale).mean(1, np.float32)
        for start in starts
    )
    if rate <= MAX_RATE:
        return DecodedAudio(joined(blocks, rate, policy), rate)
    return DecodedAudio(joined(_resampled(blocks, rate), MAX_RATE, policy), MAX_RATE)


def _resampled(blocks: Iterator[NDArray[np.float32]], rate: int) -> Iterator[NDArray[np.float32]]:
    import soxr

    stream = soxr.ResampleStream(rate, MAX_RATE, 1)
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _picture(tensor: Tensor, policy: MediaPolicy) -> DecodedImage:
    height, width, channels = tensor.shape
    if channels not in _MODES or not height or not width:
        raise Unfit("is not [height, width, channels] with 1, 3 or 4 channels")
    check_pixels(width, height, policy.max_pixels)
    check_decoded_bytes(width * height * 4, policy.max_decoded_bytes)
    return DecodedImage(flatten(Image.frombytes(_MODES[channels], (width, height), tensor.data)))


def _film(tensor: Tensor, mime: MimeType, policy: MediaPolicy) -> DecodedVideo:
    count, height, width, channels = tensor.shape
    if channels != 3 or not tensor.data:
        raise Unfit("is not [frames, height, width, 3]")
    if count > policy.max_frames:
        raise Unfit(f"has more than {policy.max_frames} frames")
    check_pixels(width, height, policy.max_pixels)
    check_decoded_bytes(len(tensor.data), policy.max_decoded_bytes)
    fps = float(mime.integer("fps")) if "fps" in mime.params else 0.0
    return DecodedVideo(np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape), fps)
