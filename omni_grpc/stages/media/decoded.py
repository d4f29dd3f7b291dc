"""What decoded media are, and how content that cannot be taken is named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A picture: RGB, upright, transparency over white; of an animated one the first frame."""

    image: Image.Image


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Sound: `samples` float32 [n] in [-1, 1], all channels mixed to one, at `rate` Hz."""

    samples: NDArray[np.float32]
    rate: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.rate


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """A film: `frames` uint8 [n, height, width, 3], RGB. `fps` 0: not known."""

    frames: NDArray[np.uint8]
    fps: float


Decoded = DecodedImage | DecodedAudio | DecodedVideo


class Unfit(Exception):  # noqa: N818 - named after its cause, as all errors are
    """Content that is refused. The text goes to the client."""


def check_pixels(width: int, height: int, most: int) -> None:
    """Raises Unfit for a picture or frame of more than `most` pixels."""
    if width * height > most:
        raise Unfit(f"has {width} x {height} pixels, more than {most}")


def check_decoded_bytes(size: int, most: int) -> None:
    """Raises Unfit for content that takes more than `most` bytes in memory."""
    if size > most:
        raise Unfit(f"takes more than {most} bytes once it is decoded")
