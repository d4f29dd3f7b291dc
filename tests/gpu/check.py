"""Replicas on a CUDA device, checked on a machine that has one:

    python -m tests.gpu.check MODEL [--out FOLDER]

MODEL is a folder with a configuration and a tokenizer; its weights are made up. Prints one line per
check, writes them as JSON, and exits with 1 if one failed. Starts of vLLM take minutes, so all of
it is one run, and no part of the test suite."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from omni_grpc.v1 import service_pb2, service_pb2_grpc

READY_S = 420.0
FREE_MIB = 700
"""GPU memory in use that is no replica's: the driver's own."""
CAPTIONS = ["a large red circle on a white background", "a small blue square on a black background"]


class Checks:
    """What was checked, and how it came out."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def note(self, name: str, ok: bool, **figures: Any) -> None:
        """One line."""
        self.lines.append({"check": name, "ok": ok, **figures})
        told = " ".join(f"{key}={value}" for key, value in figures.items())
        print(f"{'PASS' if ok else 'FAIL'} {name} {told}", flush=True)


class Server:
    """`omni-grpc serve` with these pipelines, as a process."""

    def __init__(self, *pipelines: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self.log = self._folder / "log"
        named = []
        for pipeline in pipelines:
            file = self._folder / f"{pipeline['name']}.yaml"
            file.write_text(yaml.safe_dump(pipeline))
            named += ["--pipeline", str(file)]
        command = [sys.executable, "-m", "omni_grpc.cli", "serve", *named, "--port", "0"]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self.log.open("wb"), stderr=subprocess.STDOUT
        )

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def port(self) -> int:
        """Waits until it serves."""
        deadline = time.monotonic() + READY_S
        while "Serving " not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve:\n{self.text()[-6000:]}")
            time.sleep(0.2)
        return int(self.text().split("Serving ")[1].split(". Try")[0].rpartition(":")[2])

    def engines(self) -> list[psutil.Process]:
        """vLLM's engine cores below it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "EngineCore" in process.name()]

    def end(self, number: int) -> float:
        """Ends it by a signal; seconds until it was gone."""
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - started


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    """A stub."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service_pb2_grpc.OmniServiceStub(channel)


def used_mib() -> int:
    """GPU memory in use, over all devices."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True).stdout.split()))


def within(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition held; None if it did not."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            return None
        time.sleep(0.1)
    return round(time.monotonic() - started, 1)


# ---------------------------------------------------------------- vLLM


def language(model: str, replicas: int, fraction: float, **arguments: Any) -> dict[str, Any]:
    """One stage of vLLM with made-up weights."""
    stage = {
        "name": "llm",
        "engine": "vllm",
        "model": model,
        "devices": ["cuda:0"],
        "replicas": replicas,
        "memory_fraction": fraction,
        "engine_args": {"load_format": "dummy", "max_model_len": 4096, "chat": False, **arguments},
        "environment": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        "restart": {"backoff": 0.2},
        "output": "text",
    }
    return {"name": f"llm-{replicas}", "stages": [stage]}


async def answer(stub: Any, number: int, tokens: int = 64) -> int:
    """Tokens of one answer."""
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    request = service_pb2.AddRequestRequest(
        prompt={"text": f"{number} small boats on a river"},
        stage_params=[{"stage": "llm", "sampling": sampling}],
    )
    count = 0
    async for response in stub.AddRequest(request, timeout=120):
        count += len(response.output.text.token_ids)
    return count


async def outcomes(stub: Any, count: int, tokens: int) -> dict[str, int]:
    """How many of these requests gave all tokens, and how the others ended."""
    ends: dict[str, int] = {}
    results = await asyncio.gather(
        *(answer(stub, n, tokens) for n in range(count)), return_exceptions=True
    )
    for result in results:
        if isinstance(result, grpc.aio.AioRpcError):
            end = result.code().name
        else:
            end = "whole" if result == tokens else repr(result)
        ends[end] = ends.get(end, 0) + 1
    return ends


async def two_replicas(checks: Checks, model: str) -> None:
    """Two replicas on one device; one engine is killed under load; then the server."""
    server = Server(language(model, 2, 0.2))
    port = await asyncio.to_thread(server.port)
    checks.note("two replicas on one GPU", True, ready_s=round(time.monotonic() - server.started))
    checks.note("memory", True, used_mib=used_mib(), share="2 x 0.2")
    async with calling(port) as stub:
        ends = await outcomes(stub, 64, 64)
        checks.note("64 streams", ends == {"whole": 64}, **ends)
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
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    gone = within(lambda: not any(alive(process) for process in family), 5)
    free = within(lambda: used_mib() < FREE_MIB, 5)
    left = segments()
    good = gone is not None and free is not None and not left
    checks.note(
        "kill -9 of the server leaves nothing", good, gone_s=gone, free_s=free, shm=left,
        used_mib=used_mib(),
    )  # fmt: skip


async def serving(stub: Any, replicas: int, seconds: float) -> bool:
    """Waits until so many replicas serve."""
    for _ in range(int(seconds * 2)):
        (stage,) = (await stub.GetLoad(service_pb2.GetLoadRequest())).stages
        if sum(replica.ready for replica in stage.replicas) == replicas:
            return True
        await asyncio.sleep(0.5)
    return False


def segments() -> list[str]:
    """Python's shared memory that is there."""
    return sorted(path.name for path in Path("/dev/shm").glob("psm_*"))


def alive(process: psutil.Process) -> bool:
    """Whether it runs."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def arithmetic(checks: Checks, model: str) -> None:
    """Shares that cannot fit are refused before anything starts."""
    server = Server(language(model, 2, 0.6))
    status = server.process.wait(120)
    told = [line for line in server.text().splitlines() if "1.2" in line]
    checks.note("shares that do not fit are refused", status != 0 and bool(told), told=told[:1])


async def one_replica(checks: Checks, model: str) -> None:
    """One replica, stopped in peace."""
    server = Server(language(model, 1, 0.3))
    port = await asyncio.to_thread(server.port)
    async with calling(port) as stub:
        ends = await outcomes(stub, 16, 32)
        checks.note("one replica", ends == {"whole": 16}, **ends)
    took = server.end(signal.SIGTERM)
    free = within(lambda: used_mib() < FREE_MIB, 5)
    checks.note(
        "a stop leaves nothing", server.process.returncode == 0 and free is not None,
        stop_s=round(took, 1), free_s=free, used_mib=used_mib(),
    )  # fmt: skip


# ---------------------------------------------------------------- the painter


async def painter(checks: Checks) -> None:
    """The painter on the GPU draws what it draws on the CPU."""
    from omni_grpc.config import builtin_pipelines

    content = yaml.safe_load(builtin_pipelines()["shapes"].read_text())
    pipelines = []
    for device in ("cpu", "cuda:0"):
        stage = content["stages"][0] | {"devices": [device]}
        pipelines.append(content | {"name": f"shapes-{device[:4].rstrip(':')}", "stages": [stage]})
    server = Server(*pipelines)
    port = await asyncio.to_thread(server.port)
    worst, mean, count = 0, 0.0, 0
    async with calling(port) as stub:
        for caption in CAPTIONS:
            for seed in range(4):
                one, other = [await drawn(stub, p["name"], caption, seed) for p in pipelines]
                gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
                worst, mean, count = max(worst, *gaps), mean + sum(gaps) / len(gaps), count + 1
        started = time.monotonic()
        await asyncio.gather(
            *(drawn(stub, pipelines[1]["name"], CAPTIONS[0], seed) for seed in range(64))
        )
        rate = 64 / (time.monotonic() - started)
    server.end(signal.SIGTERM)
    mean /= count
    checks.note(
        "the painter on CUDA is the CPU's", worst <= 8 and mean < 0.5,
        worst_of_255=worst, mean_of_255=round(mean, 3), pictures_per_s=round(rate),
    )  # fmt: skip


async def drawn(stub: Any, pipeline: str, caption: str, seed: int) -> bytes:
    """The pixels of a picture."""
    from PIL import Image

    request = service_pb2.AddRequestRequest(
        pipeline=pipeline,
        prompt={"text": caption},
        stage_params=[{"stage": "painter", "diffusion": {"seed": seed}}],
    )
    data = b""
    async for response in stub.AddRequest(request, timeout=120):
        data += response.output.image.data
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


async def run(model: str, parts: list[str]) -> Checks:
    """All parts, whatever becomes of each."""
    checks = Checks()
    steps: dict[str, Callable[[], Any]] = {
        "painter": lambda: painter(checks),
        "arithmetic": lambda: asyncio.to_thread(arithmetic, checks, model),
        "two": lambda: two_replicas(checks, model),
        "one": lambda: one_replica(checks, model),
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
    asked = parser.parse_args()
    checks = asyncio.run(run(asked.model, asked.only))
    (asked.out / "gpu_check.json").write_text(json.dumps(checks.lines, indent=1))
    sys.exit(not all(line["ok"] for line in checks.lines))


if __name__ == "__main__":
    main()
