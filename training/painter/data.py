"""What the painter learns from: rendered pictures with their captions, drawn without end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_grpc.stages.painter.captions import CAPTIONS, HELD_OUT
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.stages.painter.model import WORDS, word_ids
from omni_grpc.stages.painter.shapes import (
    BACKGROUNDS,
    COLOURS,
    RADII,
    cover,
    fill,
    outlines,
    reach,
)


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the training pictures whose caption isn't simply theirs."""

    dropped: float = 0.1
    """An empty caption: what guidance compares with."""
    misread: float = 0.05
    """Per attribute: a random word in its place, as in captions that people collect. A model that
    trusts its caption only so far leaves guidance something to do."""
    blended: float = 0.15
    """Between two captions: colours, radii, outlines and conditioning interpolated alike, so that
    a moving picture can pass from one caption to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    pictures: Tensor
    """[n, 3, 32, 32]"""
    words: Tensor
    """[n, 4] int64: the caption's rows of the embedding."""
    other_words: Tensor
    """[n, 4]: the caption that it is blended with."""
    weight: Tensor
    """[n]: of the other caption, 0 for most."""


class Scenes:
    """Draws batches on one device. Nothing that the judge reads as a held-out caption comes
    out, and no held-out caption."""

    def __init__(self, device: torch.device, mix: Mix) -> None:
        self._device = device
        self._mix = mix
        held_out = torch.tensor([caption in HELD_OUT for caption in CAPTIONS])
        self._held_out = held_out.to(device)
        self._seen = (~held_out).nonzero()[:, 0].to(device)
        self._words = word_ids(CAPTIONS).to(device)
        self._values = torch.cartesian_prod(*map(torch.arange, (2, 6, 6, 3))).to(device)
        self._places = torch.tensor([6 * 6 * 3, 6 * 3, 3, 1], device=device)
        self._colours, self._backgrounds = COLOURS.to(device), BACKGROUNDS.to(device)
        self._radii = RADII.to(device)
        self._judge = Judge(device)

    def draw(self, n: int, generator: torch.Generator) -> Batch:
        one, other = self._captions(n, generator), self._captions(n, generator)
        blended = self._uniform(n, generator) < self._mix.blended
        weight = torch.where(blended, self._uniform(n, generator), 0.0)
        pictures = self._render(one, other, weight, generator)
        # Half-way from red to yellow is orange: what looks like a held-out caption becomes `one`.
        shown = self._held_out[self._judge.read(pictures).index]
        plain = self._render(one, one, weight, generator)
        pictures = torch.where(shown[:, None, None, None], plain, pictures)
        weight = torch.where(shown, 0.0, weight)
        words = self._words[torch.where(weight == 0, self._misread(one, generator), one)]
        # Blends too: the empty caption must know them, or guidance drives pictures away from them.
        dropped = (self._uniform(n, generator) < self._mix.dropped)[:, None]
        empty = torch.arange(WORDS, device=self._device)
        return Batch(
            pictures,
            torch.where(dropped, empty, words),
            torch.where(dropped, empty, self._words[other]),
            weight,
        )

    def _captions(self, n: int, generator: torch.Generator) -> Tensor:
        return self._seen[self._integers(len(self._seen), n, generator)]

    def _misread(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Indices with some attributes replaced; as they were where that gives a held-out one."""
        random = self._values[self._integers(len(CAPTIONS), len(index), generator)]
        chance = torch.rand(len(index), 4, generator=generator, device=self._device)
        values = torch.where(chance < self._mix.misread, random, self._values[index])
        read = (values * self._places).sum(1)
        return torch.where(self._held_out[read], index, read)

    def _render(
        self, one: Tensor, other: Tensor, weight: Tensor, generator: torch.Generator
    ) -> Tensor:
        n = len(one)
        # One radius for both ends: between a small and a large ring stands a ring.
        first, last = (self._radii[self._values[index, 0]] for index in (one, other))
        radius = torch.lerp(first, last, weight)
        cx = (self._uniform(n, generator) * 2 - 1) * reach(radius)
        cy = (self._uniform(n, generator) * 2 - 1) * reach(radius)
        every, rows = outlines(radius, cx, cy), torch.arange(n, device=self._device)
        start, end = (every[rows, self._values[index, 2]] for index in (one, other))
        return fill(
            cover(torch.lerp(start, end, weight[:, None, None])),
            self._blend(self._colours, 1, one, other, weight),
            self._blend(self._backgrounds, 3, one, other, weight),
        )

    def _blend(
        self, table: Tensor, attribute: int, one: Tensor, other: Tensor, weight: Tensor
    ) -> Tensor:
        start, end = (table[self._values[index, attribute]] for index in (one, other))
        return torch.lerp(start, end, weight[:, None])

    def _uniform(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.rand(n, generator=generator, device=self._device)

    def _integers(self, high: int, n: int, generator: torch.Generator) -> Tensor:
        return torch.randint(high, (n,), generator=generator, device=self._device)
