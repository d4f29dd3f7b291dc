"""What a caption looks like: rendered pictures, which training learns from and the judge reads by.

Coordinates run from -1 to 1 over the picture, x to the right and y down; colour values from -1 to
1. Every picture is one shape, filled, its edge smoothed over one pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.stages.painter.captions import Background, Colour, Shape, Size

__all__ = ["BACKGROUNDS", "COLOURS", "RADII", "SIDE", "cover", "fill", "outlines", "reach"]

SIDE = 32

_RGB = {
    Colour.RED: (0.90, 0.10, 0.12),
    Colour.GREEN: (0.10, 0.65, 0.20),
    Colour.BLUE: (0.10, 0.25, 0.90),
    Colour.YELLOW: (0.98, 0.85, 0.10),
    Colour.PURPLE: (0.55, 0.15, 0.75),
    Colour.ORANGE: (0.98, 0.50, 0.05),
}
_BACKGROUND_LIGHT = {Background.WHITE: 1.0, Background.BLACK: 0.0, Background.GRAY: 0.5}
_RADIUS = {Size.SMALL: 0.34, Size.LARGE: 0.62}

COLOURS = torch.tensor([_RGB[colour] for colour in Colour]) * 2 - 1
"""[6, 3], in the order of `Colour`."""
BACKGROUNDS = torch.tensor([[_BACKGROUND_LIGHT[name]] * 3 for name in Background]) * 2 - 1
"""[3, 3], in the order of `Background`."""
RADII = torch.tensor([_RADIUS[size] for size in Size])
"""[2], in the order of `Size`."""


def reach(radius: Tensor) -> Tensor:
    """How far from the middle, along x and along y, a shape's centre may lie: every shape stays
    whole, with some room to the picture's edge."""
    return (1 - radius) * 0.6


def outlines(radius: Tensor, cx: Tensor, cy: Tensor) -> Tensor:
    """[n], [n], [n] → [n, 6, 32, 32]: how far each pixel lies outside each shape (negative:
    inside), in the order of `Shape`. Distances are exact at straight edges and circles."""
    pixels = (torch.arange(SIDE, device=radius.device) + 0.5) * (2 / SIDE) - 1
    r = radius[:, None, None]
    x = (pixels[None, None, :] - cx[:, None, None]).expand(-1, SIDE, -1)
    y = (pixels[None, :, None] - cy[:, None, None]).expand(-1, -1, SIDE)
    ax, ay = x.abs(), y.abs()
    centre = (x * x + y * y).sqrt()
    distances = {
        Shape.CIRCLE: centre - r,
        Shape.SQUARE: torch.maximum(ax, ay) - 0.86 * r,
        Shape.TRIANGLE: torch.maximum(0.894 * ax - 0.447 * y - 0.45 * r, y - 0.75 * r),
        Shape.RING: (centre - 0.75 * r).abs() - 0.25 * r,
        Shape.CROSS: torch.minimum(
            torch.maximum(ax - r, ay - 0.3 * r), torch.maximum(ay - r, ax - 0.3 * r)
        ),
        Shape.DIAMOND: (ax + ay - 1.15 * r) * 0.5**0.5,
    }
    return torch.stack([distances[shape] for shape in Shape], dim=1)


def cover(distance: Tensor) -> Tensor:
    """Signed distances → the share of each pixel that the shape covers, 0 to 1."""
    return (0.5 - distance * (SIDE / 2)).clamp(0, 1)


def fill(mask: Tensor, colour: Tensor, background: Tensor) -> Tensor:
    """Shares [n, 32, 32], colours [n, 3] and [n, 3] → pictures [n, 3, 32, 32]."""
    paper = background[:, :, None, None]
    return paper + (colour[:, :, None, None] - paper) * mask[:, None]
