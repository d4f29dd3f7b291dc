"""Draws every caption with many seeds and counts what the judge reads as asked.

    python -m training.painter.evaluate --seeds 4 --out build/painter

Seeds start where no test or example draws from; training's noise comes from another generator.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_grpc.stages.painter.captions import CAPTIONS, HELD_OUT, Shape, Size
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.stages.painter.model import WEIGHTS, Painter, load
from omni_grpc.stages.painter.sampler import paint

FIRST_SEED = 1_000_000
ATTRIBUTES = ("size", "colour", "shape", "background")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One setting's verdicts; a row per caption, a column per seed."""

    guidance: float
    steps: int
    hits: Tensor
    """[216, seeds, 4] bool: each attribute as asked."""
    distance: Tensor
    """[216, seeds]: root mean square to the nearest template."""

    def rate(self, which: Tensor) -> float:
        """Share of pictures that have all four attributes right, over the captions `which`."""
        return self.hits[which].all(-1).float().mean().item()

    def report(self) -> dict[str, Any]:
        seen = ~_held_out()
        quantiles = self.distance.flatten().quantile(torch.tensor([0.5, 0.95])).tolist()
        return {
            "guidance": self.guidance,
            "steps": self.steps,
            "seen": _rounded(self.rate(seen)),
            "held_out": _rounded(self.rate(~seen)),
            "attributes_seen": {
                name: _rounded(self.hits[seen][..., i].float().mean().item())
                for i, name in enumerate(ATTRIBUTES)
            },
            "shapes_seen": {
                f"{size} {shape}": _rounded(self.rate(seen & _of(size, shape)))
                for shape, size in product(Shape, Size)
            },
            "shapes_held_out": {
                f"{size} {shape}": _rounded(self.rate(~seen & _of(size, shape)))
                for shape, size in product(Shape, Size)
            },
            "distance_median": _rounded(quantiles[0]),
            "distance_95": _rounded(quantiles[1]),
        }


def score(
    model: Painter,
    *,
    guidance: float,
    steps: int,
    seeds: int,
    first_seed: int = FIRST_SEED,
    batch: int = 256,
) -> Scores:
    """Every caption with `seeds` seeds, each used once."""
    device = model.places.device
    judge = Judge(device)
    index = torch.arange(len(CAPTIONS)).repeat_interleave(seeds)
    read, distance = [], []
    for start in range(0, len(index), batch):
        rows = index[start : start + batch]
        pictures = paint(
            model,
            [CAPTIONS[i] for i in rows.tolist()],
            range(first_seed + start, first_seed + start + len(rows)),
            guidance=guidance,
            steps=steps,
        )
        verdict = judge.read(pictures)
        read.append(verdict.index.cpu())
        distance.append(verdict.distance.cpu())
    values = torch.cartesian_prod(*map(torch.arange, (2, 6, 6, 3)))
    hits = values[torch.cat(read)] == values[index]
    shape = (len(CAPTIONS), seeds)
    return Scores(guidance, steps, hits.view(*shape, 4), torch.cat(distance).view(shape))


def table(reports: list[dict[str, Any]]) -> str:
    """Markdown: a column per setting, a row per shape and size."""

    def row(name: str, cells: list[str]) -> str:
        return "| " + " | ".join([name, *cells]) + " |"

    def percents(key: str, inner: str | None = None) -> list[str]:
        values = [r[key] if inner is None else r[key][inner] for r in reports]
        return [f"{100 * value:.1f}" for value in values]

    lines = [
        row("% right in all four", [f"g {r['guidance']:g}, {r['steps']} steps" for r in reports]),
        row("---", ["---:"] * len(reports)),
        *(row(name, percents("shapes_seen", name)) for name in reports[0]["shapes_seen"]),
        row("**seen captions**", percents("seen")),
        row("**held-out captions**", percents("held_out")),
        *(row(f"{name} alone, seen", percents("attributes_seen", name)) for name in ATTRIBUTES),
        row("distance, median", [f"{r['distance_median']:.3f}" for r in reports]),
        row("distance, 95th percentile", [f"{r['distance_95']:.3f}" for r in reports]),
    ]
    return "\n".join(lines) + "\n"


def evaluate_into(model: Painter, args: argparse.Namespace) -> None:
    reports = [
        score(model, guidance=guidance, steps=steps, seeds=args.seeds).report()
        for steps, guidance in product(args.eval_steps, args.guidance)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"seeds_per_caption": args.seeds, "first_seed": FIRST_SEED, "settings": reports}
    (args.out / "evaluation.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = f"{args.seeds} seeds for each of {len(CAPTIONS)} captions.\n\n" + table(reports)
    (args.out / "evaluation.md").write_text(text)
    print(text, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10, help="per caption")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--eval-steps", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")


def _held_out() -> Tensor:
    return torch.tensor([caption in HELD_OUT for caption in CAPTIONS])


def _of(size: Size, shape: Shape) -> Tensor:
    return torch.tensor([c.size is size and c.shape is shape for c in CAPTIONS])


def _rounded(value: float) -> float:
    return round(value, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    add_arguments(parser)
    args = parser.parse_args()
    evaluate_into(load(args.device, args.weights), args)


if __name__ == "__main__":
    main()
