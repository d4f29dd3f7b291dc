"""Curves as one small SVG, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 320, 220, 46


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one figure over another; the horizontal axis is logarithmic."""

    over: str
    figure: str
    points: list[tuple[float, float]]


def draw(curves: list[Curve], path: Path) -> None:
    """Writes the picture."""
    panels = "".join(_panel(curve, place * WIDTH) for place, curve in enumerate(curves))
    size = f'width="{WIDTH * len(curves)}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{panels}</svg>\n')


def _panel(curve: Curve, left: int) -> str:
    most = max(y for _, y in curve.points) * 1.1 or 1.0
    first, last = (math.log2(curve.points[end][0]) for end in (0, -1))
    span = (last - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - first) / span * (WIDTH - 2 * MARGIN)
        return left + MARGIN + across, HEIGHT - MARGIN - y / most * (HEIGHT - 2 * MARGIN)

    spots = [place(x, y) for x, y in curve.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts = [f'<polyline points="{line}" fill="none" stroke="#1565c0" stroke-width="2"/>']
    for (x, y), (at, value) in zip(spots, curve.points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1565c0"/>')
        parts.append(_text(x, y - 8, f"{value:.3g}"))
        parts.append(_text(x, HEIGHT - MARGIN + 16, f"{at:g}"))
    base, right = HEIGHT - MARGIN, left + WIDTH - MARGIN
    axes = f"M{left + MARGIN} {MARGIN} V{base} H{right}"
    parts.append(f'<path d="{axes}" fill="none" stroke="#888"/>')
    middle = left + WIDTH / 2
    parts.append(_text(middle, HEIGHT - 10, curve.over))
    parts.append(_text(middle, 18, curve.figure))
    return "".join(parts)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(words)}</text>'
