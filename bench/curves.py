"""How the server's cost grows: over replicas, over streams, over stages. With fake stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.fakes import TEXT, Fakes, percentile, stage
from bench.plot import Curve, draw

REPLICAS = (1, 2, 3, 4)
STREAMS = (1, 4, 16, 64, 256, 1024)
STAGES = (1, 2, 3, 4)
STAGE_STREAMS = 64
QUICK = (1, 4)


def chain(length: int) -> list[dict[str, Any]]:
    """A text stage, and relays behind it; only the last one is heard."""
    if length == 1:
        return TEXT
    stages = [{**stage("text"), "output": None}]
    for place in range(1, length):
        relay = {"name": f"relay{place}", "engine": "python", "model": "bench.relay:Relay"}
        stages.append({**relay, "inputs": [stages[-1]["name"]], "output": None})
    stages[-1]["output"] = "text"
    return stages


def point(fakes: Fakes, name: str, stages: list[dict[str, Any]], streams: int) -> dict[str, float]:
    """One point: µs of server CPU per token, tokens per second, gap p99."""
    with fakes.serving(name, stages) as (server, address), fakes.load(address) as load:
        cost = fakes.cost(server, load, streams)
    found = {
        "cpu_us_per_token": cost.token_s * 1e6,
        "tokens_per_s": cost.rate,
        "messages_per_token": cost.messages,
        "gap_ms_p99": percentile(cost.gaps, 99) * 1e3,
    }
    words = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
    print(f"    {name}: {words}", flush=True)
    return found


def measure(fakes: Fakes, picture: Path, *, quick: bool) -> dict[str, float]:
    """All curves; drawn into `picture`."""
    figures: dict[str, float] = {}
    curves = []

    def curve(title: str, values: tuple[int, ...], at: Any) -> None:
        points = []
        for value in QUICK if quick else values:
            found = at(value)
            figures.update({f"curve_{title}_{value}_{key}": one for key, one in found.items()})
            points.append((float(value), found["cpu_us_per_token"]))
        curves.append(Curve(title, "server CPU per token, µs", points))

    streams = fakes.streams
    curve(
        "replicas",
        REPLICAS,
        lambda n: point(fakes, f"replicas-{n}", [{**TEXT[0], "replicas": n}], streams),
    )
    curve("streams", STREAMS, lambda n: point(fakes, f"streams-{n}", TEXT, n))
    some = min(streams, STAGE_STREAMS)
    curve("stages", STAGES, lambda n: point(fakes, f"stages-{n}", chain(n), some))
    draw(curves, picture)
    return figures
