"""Trains the painter and says how well it draws.

    python -m training.painter.train --out build/painter

Needs torch, numpy and safetensors. Writes weights.safetensors, evaluation.json, evaluation.md and
training.json into the folder. README.md beside this says which run the committed weights come from.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor, nn

from omni_grpc.stages.painter.model import Painter, PainterConfig, load, save
from training.painter.data import Batch, Mix, Scenes
from training.painter.evaluate import add_arguments, evaluate_into


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int = 10000
    batch: int = 1024
    rate: float = 1.5e-3
    warmup: int = 500
    decay: float = 0.999
    """Of the average of the weights over the steps, which is what is kept."""
    seed: int = 0


_Part = TypeVar("_Part", PainterConfig, "Plan", Mix)

LOG_EVERY = 500
SAVE_EVERY = 2000


class Trainer:
    def __init__(self, config: PainterConfig, plan: Plan, mix: Mix, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        self._plan = plan
        self.model = Painter(config).to(device)
        self.averaged = Painter(config).to(device).requires_grad_(False)
        self.averaged.load_state_dict(self.model.state_dict())
        self._scenes = Scenes(device, mix)
        self._generator = torch.Generator(device).manual_seed(plan.seed)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=plan.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
        )
        # Warm-up, then to nothing along a half cosine.
        self._schedule = torch.optim.lr_scheduler.SequentialLR(
            self._optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self._optimizer, 0.01, 1.0, plan.warmup),
                torch.optim.lr_scheduler.CosineAnnealingLR(
                    self._optimizer, max(1, plan.steps - plan.warmup)
                ),
            ],
            [plan.warmup],
        )

    def run(self) -> Iterator[tuple[int, float]]:
        """Trains; yields (steps done, mean loss since the last) every LOG_EVERY steps."""
        total = torch.zeros((), device=self.model.places.device)
        for done in range(1, self._plan.steps + 1):
            total += self._step(done)
            if done % LOG_EVERY == 0 or done == self._plan.steps:
                yield done, total.item() / ((done - 1) % LOG_EVERY + 1)
                total.zero_()

    def _step(self, done: int) -> Tensor:
        loss = self._loss(self._scenes.draw(self._plan.batch, self._generator))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        share = 1 - min(self._plan.decay, done / (done + 20))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.model.parameters()), share)
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        """Squared error of the clean picture, weighted 1 / (1 - t): late steps, whose errors are
        small, count more. Times are logit-normal, towards noise, where the caption decides."""
        clean, generator = batch.pictures, self._generator
        normal = torch.randn(len(clean), generator=generator, device=clean.device)
        t = torch.sigmoid(normal * 1.2 - 0.6)
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        x = torch.lerp(noise, clean, t[:, None, None, None])
        conditioning = torch.lerp(
            self.model.embed(batch.words),
            self.model.embed(batch.other_words),
            batch.weight[:, None, None],
        )
        error = (self.model.denoise(x, t, conditioning) - clean).square().mean((1, 2, 3))
        return (error / (1 - t).clamp(min=0.1)).mean()


def train(args: argparse.Namespace) -> None:
    config, plan, mix = _taken(PainterConfig, args), _taken(Plan, args), _taken(Mix, args)
    device, weights = torch.device(args.device), args.out / "weights.safetensors"
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")  # tf32 on CUDA, nothing on a CPU
    trainer, start, losses = Trainer(config, plan, mix, device), time.monotonic(), {}
    for done, loss in trainer.run():
        losses[done] = round(loss, 5)
        print(f"step {done} loss {loss:.5f} {time.monotonic() - start:.0f} s", flush=True)
        if done % SAVE_EVERY == 0 or done == plan.steps:
            save(trainer.averaged, weights)
    facts = {
        "config": asdict(config),
        "plan": asdict(plan),
        "mix": asdict(mix),
        "parameters": sum(values.numel() for values in trainer.model.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start),
        "losses": losses,
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    torch.set_float32_matmul_precision("highest")
    evaluate_into(load(device, weights), args)


def _taken(kind: type[_Part], args: argparse.Namespace) -> _Part:
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for kind in (PainterConfig, Plan, Mix):
        for field in fields(kind):
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    add_arguments(parser)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
