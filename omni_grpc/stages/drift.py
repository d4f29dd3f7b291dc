"""What a film of the painter's shows, and how it moves.

A frame is the picture before it, moved along a path, partly noised and drawn again (SDEdit, Meng et
al. 2021, arXiv:2108.01073): it stays what it was, and what the moving blurred is sharp again. Where
the scene changes, a picture is painted anew from the film's own noise, so that scenes that are
blended into each other lie in the same place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from omni_grpc.stages.painter import sampler
from omni_grpc.stages.painter.shapes import SIDE

KEPT = 0.6
"""The time to which a frame's picture is taken back, from 0 (noise) to 1 (kept as it is)."""
FRAME_STEPS = 2
"""Denoise steps from there. With two or more, every frame is read as its caption."""
_REACH = (3.0, 2.5)
"""How far from the middle shapes drift, in pixels: large ones stay whole."""
_SPEED = (1.1, 1.6)
"""Radians per second, across and down."""
_FAINT = 0.4
"""Difference from the background, over all channels, below which a pixel is none of the shape's."""


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What is drawn: `cond` and `uncond` [4, width], of the caption and of the one to draw away
    from; `seed` is that of the film's noise."""

    cond: Tensor
    uncond: Tensor
    guidance: float
    seed: int


def mix(base: Scene, target: Scene, weight: float) -> Scene:
    """`weight` of `target` over `base`. Noise does not mix: the target's is taken at once."""
    if weight == 1:
        return target
    return Scene(
        torch.lerp(base.cond, target.cond, weight),
        torch.lerp(base.uncond, target.uncond, weight),
        base.guidance + weight * (target.guidance - base.guidance),
        target.seed,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Shot:
    """Pictures of one scene between two denoise steps. `x` [n, 3, 32, 32]."""

    x: Tensor
    scene: Scene
    times: tuple[float, ...]
    step: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shots share batches, however many pictures each has."""
        return self.x.shape[1:]

    @property
    def steps_left(self) -> int:
        """Steps until it is done."""
        return len(self.times) - 1 - self.step


def afresh(scene: Scene, steps: int, device: torch.device) -> Shot:
    """One picture, from noise."""
    noise = sampler.initial_noise(scene.seed)[None].to(device)
    return Shot(noise, scene, tuple(sampler.timesteps(steps).tolist()))


def onward(picture: Tensor, scene: Scene, first: int, count: int, fps: float) -> Shot:
    """The film's frames from number `first` on, from a picture [3, 32, 32] of this scene."""
    frames = moved(picture, places(first, count, fps).to(picture.device) - middle(picture))
    # One noise for all frames of a chunk, or they would flicker; another for the next, or what it
    # adds would add up.
    noise = sampler.initial_noise((scene.seed + first + 1) % 2**64).to(picture.device)
    kept = torch.full((count,), KEPT, device=picture.device)
    times = torch.linspace(KEPT, 1, FRAME_STEPS + 1).tolist()
    return Shot(sampler.renoise(frames, noise[None], kept), scene, tuple(times))


def places(first: int, count: int, fps: float) -> Tensor:
    """[count, 2]: where the shape is in each frame, in pixels right of and below the middle."""
    seconds = torch.arange(first, first + count, dtype=torch.float64)[:, None] / fps
    return (torch.tensor(_REACH) * torch.sin(seconds * torch.tensor(_SPEED))).float()


def middle(picture: Tensor) -> Tensor:
    """[2]: where the shape on a picture [3, 32, 32] is; the middle where none can be told."""
    edge = torch.cat([picture[:, 0], picture[:, -1], picture[:, :, 0], picture[:, :, -1]], dim=1)
    paper = edge.median(dim=1).values[:, None, None]
    contrast = (picture - paper).abs().sum(0)
    mass = torch.where(contrast > _FAINT, contrast, 0)
    pixels = torch.arange(SIDE, device=picture.device) - (SIDE - 1) / 2
    across, down = (mass.sum(0) * pixels).sum(), (mass.sum(1) * pixels).sum()
    return torch.stack([across, down]) / mass.sum().clamp(min=1e-6)


def moved(picture: Tensor, by: Tensor) -> Tensor:
    """A picture [3, 32, 32], moved by [n, 2] pixels right and down: [n, 3, 32, 32]. What comes in
    at the edge is the edge again."""
    count = len(by)
    affine = torch.eye(2, 3, device=picture.device).repeat(count, 1, 1)
    affine[:, :, 2] = -by / (SIDE / 2)
    grid = functional.affine_grid(affine, [count, 3, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(
        picture.expand(count, -1, -1, -1), grid, padding_mode="border", align_corners=False
    )
