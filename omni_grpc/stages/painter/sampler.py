"""Noise → picture, one denoise step at a time.

A step takes every sample's own time, next time, captions and guidance, so requests that began at
different ticks, with different numbers of steps, share a batch. What a sample becomes doesn't
depend on the others, up to rounding: float32 products are summed in an order that the batch's size
may change. See `TOLERANCE`.

The path is x_t = t * clean + (1 - t) * noise, t from 0 to 1: flow matching with straight paths,
Lipman et al. 2022, arXiv:2210.02747; Liu et al. 2022, arXiv:2209.03003.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omni_grpc.stages.painter.captions import Caption
from omni_grpc.stages.painter.model import Painter
from omni_grpc.stages.painter.shapes import SIDE

__all__ = [
    "TOLERANCE",
    "initial_noise",
    "paint",
    "renoise",
    "step",
    "timesteps",
    "to_image",
]

TOLERANCE = 1e-3
"""The most by which a finished picture's values (of -1 to 1) may differ with the batch it was
drawn in, on one device in float32: an eighth of one level of an 8-bit image."""

_SHIFT = 3.0


def initial_noise(seed: int) -> Tensor:
    """[3, 32, 32] standard normal, the same for a seed on every device and in every batch: drawn
    on the CPU by the request's own generator. Seeds are 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, SIDE, SIDE, generator=generator)


def timesteps(steps: int) -> Tensor:
    """[steps + 1], from 0 to 1: step i goes from entry i to entry i + 1.

    Denser near the noise, t / (t + 3 (1 - t)) for an even t (Esser et al. 2024, arXiv:2403.03206,
    section 5.3.2): with long first steps, high guidance swings past the background it wants, and
    gray becomes black or white. Raises ValueError if steps < 1."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    even = torch.linspace(0, 1, steps + 1)
    return even / (even + _SHIFT * (1 - even))


def renoise(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Pictures [n, 3, 32, 32] taken back to times t [n], to be drawn again from there: the less t,
    the freer (SDEdit, Meng et al. 2021, arXiv:2108.01073). For video: the last frame, partly
    noised, starts the next."""
    t = t[:, None, None, None]
    return t * clean + (1 - t) * noise


@torch.no_grad()
def step(
    model: Painter,
    x: Tensor,
    t: Tensor,
    t_next: Tensor,
    cond: Tensor,
    uncond: Tensor,
    guidance: Tensor,
) -> tuple[Tensor, Tensor]:
    """One denoise step → (x at t_next, the clean pictures as they now look), both [n, 3, 32, 32].

    x [n, 3, 32, 32]; t, t_next, guidance [n], 0 <= t < t_next <= 1; cond and uncond [n, 4, width].
    A sample with guidance 1 doesn't compute its uncond. At t_next = 1 both results are the same.

    Guidance: clean = uncond + guidance * (cond - uncond), Ho & Salimans 2022, arXiv:2207.12598,
    then cut to -1..1 (Saharia et al. 2022, arXiv:2205.11487, static thresholding), without which
    high guidance overshoots. Euler's step along (clean - x) / (1 - t), the path's velocity.
    """
    guided = (guidance != 1).nonzero()[:, 0]
    every = model.denoise(
        torch.cat([x, x[guided]]), torch.cat([t, t[guided]]), torch.cat([cond, uncond[guided]])
    )
    clean, base = every[: len(x)], every[len(x) :]
    scale = guidance[guided, None, None, None]
    clean = clean.index_copy(0, guided, base + scale * (clean[guided] - base)).clamp(-1, 1)
    share = ((t_next - t) / (1 - t))[:, None, None, None]
    return torch.lerp(x, clean, share), clean


def paint(
    model: Painter,
    captions: Sequence[Caption | None],
    seeds: Sequence[int],
    *,
    guidance: float = 4.0,
    steps: int = 20,
    negative: Caption | None = None,
) -> Tensor:
    """Whole pictures [n, 3, 32, 32], -1 to 1, in one batch: for evaluation and tests.

    Raises ValueError if steps < 1 or there isn't one seed per caption."""
    if len(captions) != len(seeds):
        raise ValueError(f"{len(captions)} captions but {len(seeds)} seeds")
    if not captions:
        return torch.empty(0, 3, SIDE, SIDE)
    device, n = model.places.device, len(captions)
    x = torch.stack([initial_noise(seed) for seed in seeds]).to(device)
    cond, uncond = model.encode(captions), model.encode([negative]).expand(n, -1, -1)
    times = timesteps(steps).to(device)
    scale = torch.full((n,), guidance, device=device)
    for t, t_next in pairwise(times):
        x, _ = step(model, x, t.expand(n), t_next.expand(n), cond, uncond, scale)
    return x


def to_image(x: Tensor) -> npt.NDArray[np.uint8]:
    """Pictures [..., 3, 32, 32] of -1 to 1 → RGB bytes [..., 32, 32, 3]; beyond that is cut."""
    levels = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    image: npt.NDArray[np.uint8] = levels.movedim(-3, -1).contiguous().cpu().numpy()
    return image
