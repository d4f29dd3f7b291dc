"""Media of prompts: read from bytes, URIs or tensors, checked against the policy, decoded."""

from omni_grpc.stages.media.decoded import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from omni_grpc.stages.media.load import invalid_media, load_media
from omni_grpc.stages.media.prompt import media_policy, prompt_media

__all__ = [
    "Decoded",
    "DecodedAudio",
    "DecodedImage",
    "DecodedVideo",
    "invalid_media",
    "load_media",
    "media_policy",
    "prompt_media",
]
