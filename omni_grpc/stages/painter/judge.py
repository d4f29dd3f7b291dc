"""Which caption a picture shows: the one with the nearest rendered template.

A template is a caption drawn by `shapes` with its centre on a grid over all the places where
training put centres. The distance is Euclidean over all pixels, so a picture must have colours,
background, shape and size right at once; where the shape lies is free.

The model never sees the templates' grid, and the judge never sees the caption that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_grpc.stages.painter.captions import CAPTIONS, Caption, Shape, Size
from omni_grpc.stages.painter.shapes import (
    BACKGROUNDS,
    COLOURS,
    RADII,
    SIDE,
    cover,
    outlines,
    reach,
)

__all__ = ["Judge", "Verdict"]

_GRID = 9  # centres along each axis: at most 1.6 pixels apart


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    index: Tensor
    """[n]: what each picture shows, by its place in `CAPTIONS`."""
    distance: Tensor
    """[n]: root mean square over all values to the nearest template; values run from -1 to 1."""

    @property
    def captions(self) -> list[Caption]:
        return [CAPTIONS[i] for i in self.index.tolist()]


class Judge:
    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._masks = _masks().to(device)  # [12 * 81, 1024], size slowest, then shape
        self._colours = COLOURS.to(device)
        self._backgrounds = BACKGROUNDS.to(device)

    def read(self, x: Tensor) -> Verdict:
        """Pictures [n, 3, 32, 32] → what they show."""
        squared, index = self._squared_distances(x.flatten(2)).min(dim=1)
        return Verdict(index, (squared / (3 * SIDE * SIDE)).clamp(min=0).sqrt())

    def _squared_distances(self, x: Tensor) -> Tensor:
        """[n, 3, 1024] → [n, 216], to the nearest of each caption's 81 templates.

        A template is b + (c - b) m, with background b, colour c and mask m, so the distance
        |x - b - (c - b) m|² = |x - b|² - 2 (c - b) · <x - b, m> + |c - b|² |m|² needs products
        with the 972 masks only, not with all 17496 templates."""
        masks = self._masks
        inner = x @ masks.T  # [n, 3, 972]
        area, squares = masks.sum(1), masks.square().sum(1)
        found = x.new_empty(len(x), len(Size), len(self._colours), len(Shape), len(BACKGROUNDS))
        for b, background in enumerate(self._backgrounds):
            rest = (x - background[:, None]).square().sum((1, 2))
            overlap = inner - background[:, None] * area
            for c, colour in enumerate(self._colours):
                contrast = colour - background
                cross = torch.einsum("nck,c->nk", overlap, contrast)
                squared = rest[:, None] - 2 * cross + contrast.square().sum() * squares
                found[:, :, c, :, b] = squared.view(len(x), len(Size), len(Shape), -1).amin(-1)
        return found.flatten(1)


def _masks() -> Tensor:
    """[12 * 81, 1024]: every size and shape at every centre of the grid."""
    places = torch.linspace(-1, 1, _GRID)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    masks = []
    for radius in RADII:
        cx, cy = columns.flatten() * reach(radius), rows.flatten() * reach(radius)
        masks.append(cover(outlines(radius.expand(len(cx)), cx, cy)).transpose(0, 1))
    return torch.stack(masks).reshape(-1, SIDE * SIDE)
