"""The painter's transformer: a DiT that sees the picture's patches and the caption's words as one
sequence, and says what the clean picture is.

DiT with adaptive layer norm: Peebles & Xie 2022, arXiv:2212.09748. One modulation shared by all
blocks plus a table per block: PixArt-alpha, arXiv:2310.00426. Predicting the clean picture rather
than the noise or the velocity: Li & He 2025, arXiv:2511.13720.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from omni_grpc.stages.painter.captions import Background, Caption, Colour, Shape, Size
from omni_grpc.stages.painter.shapes import SIDE

__all__ = ["WEIGHTS", "WORDS", "Painter", "PainterConfig", "load", "save", "word_ids"]

WEIGHTS = Path(__file__).with_name("weights.safetensors")
WORDS = 4
"""L: words that carry meaning in a caption, one per attribute; the grammar fixes the others."""

_VOCABULARIES: tuple[type[StrEnum], ...] = (Size, Colour, Shape, Background)
_TIME_FEATURES = 64
_FASTEST = 200.0  # radians over the whole way from noise to picture


@dataclass(frozen=True, slots=True)
class PainterConfig:
    width: int = 128
    depth: int = 4
    heads: int = 4
    patch: int = 8
    """Pixels along a patch's side: 32 / patch squared is the number of picture tokens."""


def _row_ids() -> dict[StrEnum | None, int]:
    ids: dict[StrEnum | None, int] = {}
    for slot in _VOCABULARIES:
        for word in slot:
            ids[word] = WORDS + len(ids)
    return ids


_ROW_OF = _row_ids()  # rows 0 to 3: no word in that place
_ROWS = WORDS + len(_ROW_OF)


def word_ids(captions: Sequence[Caption | None]) -> Tensor:
    """[n, 4] int64 rows of the embedding; None is the empty caption."""
    rows = [
        list(range(WORDS)) if caption is None else [_ROW_OF[word] for word in caption]
        for caption in captions
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), WORDS)


class Painter(nn.Module):
    """Rows of a batch don't see each other: each sample has its own time and conditioning."""

    def __init__(self, config: PainterConfig) -> None:
        super().__init__()
        self.config = config
        width, pixels = config.width, 3 * config.patch**2
        tokens = (SIDE // config.patch) ** 2
        self.words = nn.Embedding(_ROWS, width)
        self.patches = nn.Linear(pixels, width)
        self.places = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.time = nn.Sequential(
            nn.Linear(_TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.caption = nn.Linear(WORDS * width, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(_Block(width, config.heads) for _ in range(config.depth))
        self.out_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, pixels)
        nn.init.normal_(self.words.weight, std=0.3)
        for linear in (self.modulation, self.out):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def encode(self, captions: Sequence[Caption | None]) -> Tensor:
        """Conditioning [n, 4, width], None for the empty caption. Captions blend by interpolating
        it: the painter was trained on such blends too."""
        return self.embed(word_ids(captions).to(self.words.weight.device))

    def embed(self, ids: Tensor) -> Tensor:
        """`word_ids` [n, 4] → conditioning [n, 4, width]."""
        conditioning: Tensor = self.words(ids)
        return conditioning

    def denoise(self, x: Tensor, t: Tensor, conditioning: Tensor) -> Tensor:
        """The clean pictures [n, 3, 32, 32] that `x` [n, 3, 32, 32] may come from, on average.
        t [n] runs from 0 (x is noise) to 1 (x is clean); conditioning [n, 4, width]."""
        state: Tensor = self.time(_time_features(t)) + self.caption(conditioning.flatten(1))
        shared: Tensor = self.modulation(functional.silu(state))
        picture: Tensor = self.patches(self._cut(x)) + self.places
        tokens = torch.cat([picture, conditioning], dim=1)
        for block in self.blocks:
            tokens = block(tokens, shared)
        return self._join(self.out(self.out_norm(tokens[:, : len(self.places)])))

    forward = denoise

    def _cut(self, x: Tensor) -> Tensor:
        patch, side = self.config.patch, SIDE // self.config.patch
        cut = x.view(-1, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(len(x), side * side, 3 * patch * patch)

    def _join(self, patches: Tensor) -> Tensor:
        patch, side = self.config.patch, SIDE // self.config.patch
        joined = patches.view(-1, side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
        return joined.reshape(-1, 3, SIDE, SIDE)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Parameter(torch.zeros(6 * width))
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        scale_a, shift_a, gate_a, scale_m, shift_m, gate_m = (
            (shared + self.modulation)[:, None].chunk(6, dim=-1)
        )  # fmt: skip
        x = x + (1 + gate_a) * self._attend(self.norm_attention(x) * (1 + scale_a) + shift_a)
        grown: Tensor = self.mlp(self.norm_mlp(x) * (1 + scale_m) + shift_m)
        return x + (1 + gate_m) * grown

    def _attend(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv: Tensor = self.qkv(x)
        q, k, v = qkv.view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = (
            functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(n, length, width)
        )
        mixed: Tensor = self.mix(seen)
        return mixed


def _time_features(t: Tensor) -> Tensor:
    steps = torch.linspace(0, math.log(_FASTEST), _TIME_FEATURES // 2, device=t.device)
    angles = t[:, None] * steps.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def save(model: Painter, path: Path) -> None:
    """Weights in half precision, the configuration in the file's metadata."""
    weights = {
        name: value.detach().cpu().half().contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, path, metadata={"config": json.dumps(asdict(model.config))})


def load(device: str | torch.device = "cpu", path: Path = WEIGHTS) -> Painter:
    """The trained painter in float32, for inference only. Raises FileNotFoundError or
    safetensors' error for a file that isn't one."""
    with safe_open(path, framework="pt") as file:
        config = PainterConfig(**json.loads(file.metadata()["config"]))
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    model = Painter(config)
    model.load_state_dict(weights)
    return model.requires_grad_(False).eval().to(device)
