"""Replicas on a CUDA device, checked on a machine that has one:

    python -m tests.gpu.check MODEL [--only PART ...] [--small] [--out FOLDER]

MODEL is a folder with a configuration and a tokenizer; its weights are made up. Prints one line per
check, writes them as JSON, and exits with 1 if one failed. Starts of vLLM take minutes, so all of
it is one run, and no part of the test suite. `--small` tries the parts `one` and `shapes` on a CPU,
with tiny shapes: it checks these files, not a GPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.v1 import service_pb2
from tests.gpu.asking import CPU, GPU, Place, drawn, language, outcomes
from tests.gpu.bigger import bigger
from tests.gpu.serving import FREE_MIB, Checks, Server, alive, calling, stopped, used_mib, within

CAPTIONS = ["a large red circle on a white background", "a small blue square on a black background"]


async def two_replicas(checks: Checks, model: str, place: Place) -> None:
    """Two replicas on one device; one engine is killed under load; then the server."""
    with Server(language(place, model, 2, 0.2)) as server:
        port = await asyncio.to_thread(server.port)
        checks.note("two replicas on one GPU", True, ready_s=server.age())
        checks.note("memory", True, used_mib=used_mib(), share="2 x 0.2")
        async with calling(port) as stub:
            ends = await outcomes(stub, 64, 64)
            checks.note("64 streams", ends == {"whole": 64}, **ends)
            await engine_killed(checks, server, stub)
        family = server.family()
        server.process.kill()
        gone = within(lambda: not any(map(alive, family)), 5)
        free = within(lambda: used_mib() < server.used_mib + FREE_MIB, 5)
        within(lambda: not server.left(), 5)
        left = server.left()
        good = gone is not None and free is not None and not left
        checks.note(
            "kill -9 of the server leaves nothing", good, gone_s=gone, free_s=free, shm=left,
            used_mib=used_mib(),
        )  # fmt: skip


async def engine_killed(checks: Checks, server: Server, stub: Any) -> None:
    """One of two engines is killed under load; the other serves, and it comes back."""
    load = asyncio.create_task(outcomes(stub, 64, 2000))
    await asyncio.sleep(2)
    victim = server.engines()[0]
    victim.kill()
    ends = await load
    lost = ends.get("ABORTED", 0) + ends.get("UNAVAILABLE", 0)
    good = ends.get("whole", 0) > 0 and lost > 0 and lost + ends["whole"] == 64
    checks.note("an engine is killed under load", good, **ends)
    ends = await outcomes(stub, 32, 64)
    checks.note("the other replica serves", ends == {"whole": 32}, **ends)
    started = time.monotonic()
    whole = await serving(stub, 2, 200)
    checks.note("both serve again", whole, after_s=round(time.monotonic() - started))
    ends = await outcomes(stub, 64, 64)
    checks.note("64 streams again", ends == {"whole": 64}, **ends)


async def serving(stub: Any, replicas: int, seconds: float) -> bool:
    """Waits until so many replicas serve."""
    for _ in range(int(seconds * 2)):
        (stage,) = (await stub.GetLoad(service_pb2.GetLoadRequest())).stages
        if sum(replica.ready for replica in stage.replicas) == replicas:
            return True
        await asyncio.sleep(0.5)
    return False


def arithmetic(checks: Checks, model: str) -> None:
    """Shares that cannot fit are refused before anything starts."""
    with Server(language(GPU, model, 2, 0.6)) as server:
        status = server.process.wait(120)
    told = [line for line in server.text().splitlines() if "1.2" in line]
    checks.note("shares that do not fit are refused", status != 0 and bool(told), told=told[:1])


async def one_replica(checks: Checks, model: str, place: Place) -> None:
    """One replica, stopped in peace."""
    with Server(language(place, model, 1, 0.3)) as server:
        port = await asyncio.to_thread(server.port)
        async with calling(port) as stub:
            ends = await outcomes(stub, 16, 32)
            checks.note("one replica", ends == {"whole": 16}, ready_s=server.age(), **ends)
        await stopped(checks, "a stop leaves nothing", server)


async def painter(checks: Checks) -> None:
    """The painter on the GPU draws what it draws on the CPU."""
    from omni_grpc.config import builtin_pipelines

    content = yaml.safe_load(builtin_pipelines()["shapes"].read_text())
    pipelines = []
    for device in ("cpu", "cuda:0"):
        stage = content["stages"][0] | {"devices": [device]}
        pipelines.append(content | {"name": f"shapes-{device[:4].rstrip(':')}", "stages": [stage]})
    worst, mean, count = 0, 0.0, 0
    with Server(*pipelines) as server:
        port = await asyncio.to_thread(server.port)
        async with calling(port) as stub:
            for caption in CAPTIONS:
                for seed in range(4):
                    one, other = [await pixels(stub, p["name"], caption, seed) for p in pipelines]
                    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
                    worst, mean, count = max(worst, *gaps), mean + sum(gaps) / len(gaps), count + 1
            started = time.monotonic()
            await asyncio.gather(
                *(pixels(stub, pipelines[1]["name"], CAPTIONS[0], seed) for seed in range(64))
            )
            rate = 64 / (time.monotonic() - started)
        server.end(signal.SIGTERM)
    mean /= count
    checks.note(
        "the painter on CUDA is the CPU's", worst <= 8 and mean < 0.5,
        worst_of_255=worst, mean_of_255=round(mean, 3), pictures_per_s=round(rate),
    )  # fmt: skip


async def pixels(stub: Any, pipeline: str, caption: str, seed: int) -> bytes:
    """The pixels of a picture."""
    return (await drawn(stub, pipeline, "painter", caption, seed=seed)).convert("RGB").tobytes()


async def run(model: str, parts: list[str], place: Place) -> Checks:
    """All parts, whatever becomes of each."""
    checks = Checks()
    steps: dict[str, Callable[[], Any]] = {
        "painter": lambda: painter(checks),
        "arithmetic": lambda: asyncio.to_thread(arithmetic, checks, model),
        "two": lambda: two_replicas(checks, model, place),
        "one": lambda: one_replica(checks, model, place),
        "shapes": lambda: bigger(checks, model, place),
    }
    for name in parts or steps:
        try:
            await steps[name]()
        except Exception as error:
            checks.note(name, False, error=f"{type(error).__name__}: {str(error)[-3000:]}")
    return checks


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    checks = asyncio.run(run(asked.model, asked.only, CPU if asked.small else GPU))
    (asked.out / "gpu_check.json").write_text(json.dumps(checks.lines, indent=1))
    sys.exit(not all(line["ok"] for line in checks.lines))


if __name__ == "__main__":
    main()
