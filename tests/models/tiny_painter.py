"""The painter's transformer with weights of chance: as quick as the real one, and draws nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_grpc.stages.painter.model import Painter, PainterConfig, save


def build(path: Path) -> Path:
    """Weights at `path`, the same each time."""
    torch.manual_seed(0)
    model = Painter(PainterConfig(width=32, depth=2, heads=2))
    with torch.no_grad():
        for parameter in model.parameters():
            # The real start is all zero where it matters, and zeros hide mistakes.
            parameter.normal_(std=0.2)
    save(model, path)
    return path
