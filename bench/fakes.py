"""What the server itself costs: figures with fake stages, no model.

CPU is the server process's own, by psutil, over a window in which all streams run; never that of
replicas or of the load generators."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.load import Load
from bench.processes import Measured, environment, free_port

INTERVAL_MS = 20
"""50 tokens a second and stream."""
WINDOW_S = 0.06
START_S = 60.0
MIB = 1 << 20


def stage(name: str, modality: str = "text", **fields: Any) -> dict[str, Any]:
    """A fake stage that gives its output to the client."""
    args = {"modality": modality}
    return {"name": name, "engine": "fake", "engine_args": args, "output": modality, **fields}


TEXT = [stage("text")]
HOPS = [stage("text"), stage("audio", "audio", inputs=["text"])]
PICTURES = [stage("text"), stage("image", "image", inputs=["text"])]


def request(modality: str = "TEXT", prompt: str = "go", **scripts: dict[str, Any]) -> str:
    """A request as a load generator takes it: a script by stage."""
    params = [{"stage": name, "custom": script} for name, script in scripts.items()]
    outputs = [f"MODALITY_{modality}"]
    return json.dumps(
        {"prompt": {"text": prompt}, "stage_params": params, "output_modalities": outputs}
    )


def talk(seconds: float, interval_ms: float = INTERVAL_MS) -> str:
    """A request for a stream of tokens that takes so long."""
    outputs = max(2, int(seconds * 1e3 / interval_ms))
    return request(text={"outputs": outputs, "interval_ms": interval_ms})


@dataclass(slots=True)
class Fakes:
    """Where the figures are gathered. `seconds` is how long one window of measuring is."""

    logs: Path
    seconds: float = 8.0
    rounds: int = 5
    streams: int = 256
    generators: int = 2
    interval_ms: float = INTERVAL_MS
    figures: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def serving(
        self, name: str, stages: list[dict[str, Any]], *options: str
    ) -> Iterator[tuple[Measured, str]]:
        """Our server of a pipeline of fake stages; its address."""
        file, port = self.logs / f"{name}.yaml", free_port()
        file.write_text(yaml.safe_dump({"name": name, "stages": stages}))
        arguments = ["serve", "--pipeline", str(file), "--port", str(port)]
        arguments += ["--max-requests", "4096", *options]
        log = self.logs / f"{name}.log"
        with Measured.module("omni_grpc.cli", *arguments, log=log) as server:
            self.figures.setdefault("load_s", server.await_line("Serving", START_S))
            yield server, f"127.0.0.1:{port}"

    @contextmanager
    def bare(self) -> Iterator[tuple[Measured, str]]:
        """The floor."""
        port = free_port()
        with Measured.module("bench.bare", str(port), log=self.logs / "bare.log") as server:
            server.await_line("Serving", START_S)
            yield server, f"127.0.0.1:{port}"

    @contextmanager
    def load(self, address: str) -> Iterator[Load]:
        """Load generators for an address."""
        log = self.logs / "load-fakes.log"
        load = Load("scripted", address, self.generators, environment(), log, talk(0))
        try:
            load.ready()
            yield load
        finally:
            load.close()

    def cost(self, server: Measured, load: Load, streams: int) -> Cost:
        """What these streams cost the server, over a window in which all of them run."""
        settle = 1.0 + streams / 256
        load.begin([talk(self.seconds + 2 * settle, self.interval_ms)] * streams, 0)
        time.sleep(settle)
        started, before = time.monotonic(), server.cpu_s()
        time.sleep(self.seconds)
        used, ended = server.cpu_s() - before, time.monotonic()
        taken = load.wait()
        messages, tokens = taken.between(started, ended)
        if not messages:
            raise RuntimeError(f"no message came in {self.seconds:g} s: measure for longer")
        seconds = ended - started
        gaps = sorted(taken.gaps)
        return Cost(used / messages, used / tokens, messages / tokens, tokens / seconds, gaps)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU per message and per token, messages per token, tokens per second, and the
    gaps between messages in seconds."""

    message_s: float
    token_s: float
    messages: float
    rate: float
    gaps: list[float]


def cpu(fakes: Fakes) -> None:
    """Server CPU per message, beside a bare stream's; and per token with a merge window."""
    # What is compared is the work for a message: so neither merges more while it is busy.
    alone = ("--busy-merge-window", "0")
    merging = ("--merge-window", str(WINDOW_S), *alone)
    with (
        fakes.bare() as (bare, bare_at),
        fakes.serving("plain", TEXT, *alone) as (plain, plain_at),
        fakes.serving("merging", TEXT, *merging) as (merged, merged_at),
        fakes.load(bare_at) as bare_load,
        fakes.load(plain_at) as plain_load,
        fakes.load(merged_at) as merged_load,
    ):
        rounds = []
        for _ in range(fakes.rounds):
            floor = fakes.cost(bare, bare_load, fakes.streams)
            ours = fakes.cost(plain, plain_load, fakes.streams)
            less = fakes.cost(merged, merged_load, fakes.streams)
            rounds.append((floor, ours, less))
            print(
                f"    bare {floor.message_s * 1e6:.1f} µs, ours {ours.message_s * 1e6:.1f} µs per"
                f" message ({ours.messages:.2f} messages per token), merged"
                f" {less.token_s * 1e6:.1f} µs per token ({less.messages:.2f})",
                flush=True,
            )
    middle = statistics.median
    fakes.figures |= {
        "cpu_vs_bare_256": middle(ours.message_s / floor.message_s for floor, ours, _ in rounds),
        "cpu_us_per_message_256": middle(ours.message_s * 1e6 for _, ours, _ in rounds),
        "cpu_us_per_message_bare_256": middle(floor.message_s * 1e6 for floor, _, _ in rounds),
        "messages_per_token_256": middle(ours.messages for _, ours, _ in rounds),
        "cpu_us_per_token_merged_256": middle(less.token_s * 1e6 for _, _, less in rounds),
        "messages_per_token_merged_256": middle(less.messages for _, _, less in rounds),
    }


def hop(fakes: Fakes) -> None:
    """What a second stage adds to an output's way, with nothing else to do: each word goes to the
    client, and to a stage that makes a tone of it at once."""
    from bench import probes

    count = max(40, int(fakes.seconds * 50))
    with fakes.serving("hops", HOPS) as (_, address):
        hops = asyncio.run(probes.hops(address, count))
        overheads = asyncio.run(probes.first_outputs(address, max(20, count // 4)))
    fakes.figures |= {
        "hop_ms_p50": percentile(hops, 50) * 1e3,
        "hop_ms_p99": percentile(hops, 99) * 1e3,
        "first_output_over_stage_ms_p50": percentile(overheads, 50) * 1e3,
        "first_output_over_stage_ms_p99": percentile(overheads, 99) * 1e3,
    }


def idle(fakes: Fakes) -> None:
    """What a server that does nothing uses: CPU, memory, and memory per request that waits."""
    from bench import probes

    count = fakes.streams
    with fakes.serving("idle", TEXT) as (server, address):
        time.sleep(1.0)
        before, started = server.cpu_s(), time.monotonic()
        time.sleep(max(3.0, fakes.seconds))
        used = server.cpu_s() - before
        fakes.figures["idle_cpu_percent"] = 100 * used / (time.monotonic() - started)
        fakes.figures["server_mib"] = server.rss() / MIB
        asyncio.run(probes.holding(address, count, talk(0.1), lambda: None))
        resident = server.rss()
        quiet = request(text={"outputs": 2, "interval_ms": 3_600_000})
        idle_rss: list[int] = []
        asyncio.run(probes.holding(address, count, quiet, lambda: idle_rss.append(server.rss())))
        running: list[int] = []
        busy = talk(3600)
        asyncio.run(probes.holding(address, count, busy, lambda: running.append(server.rss())))
    fakes.figures |= {
        "kib_per_idle_stream": max(0, idle_rss[0] - resident) / count / 1024,
        "kib_per_running_stream": max(0, running[0] - resident) / count / 1024,
    }


def cancel(fakes: Fakes) -> None:
    """From a client's cancel to a replica that is free, while other streams run."""
    from bench import probes

    count = max(10, int(fakes.seconds * 15))
    with (
        fakes.serving("cancel", TEXT) as (_, address),
        fakes.load(address) as load,
    ):
        # It goes with its load generators, when all is measured.
        load.begin([talk(120.0)] * (fakes.streams - 1), 0)
        times = asyncio.run(probes.cancels(address, count, fakes.streams - 1))
        load.kill()
    fakes.figures |= {
        "cancel_ms_p50": percentile(times, 50) * 1e3,
        "cancel_ms_p99": percentile(times, 99) * 1e3,
    }


def large(fakes: Fakes) -> None:
    """Pictures of 1 MiB through one server, four streams at once."""
    count = max(8, int(fakes.seconds * 8))
    script = {"outputs": count, "bytes": MIB}
    big = request("IMAGE", text={"outputs": 1}, image=script)
    with fakes.serving("large", PICTURES) as (server, address), fakes.load(address) as load:
        before = server.cpu_s()
        taken = load.run([big] * 4, 0)
        used = server.cpu_s() - before
    fakes.figures |= {
        "outputs_1mib_per_s": 4 * count / (taken.ended - taken.started),
        "cpu_ms_per_1mib": used * 1e3 / (4 * count),
    }


def percentile(values: list[float], part: float) -> float:
    """The value that `part` percent are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))]


PARTS = (cpu, hop, idle, cancel, large)


def measure(fakes: Fakes) -> dict[str, float]:
    """All of them, by name."""
    for part in PARTS:
        print(f"  {part.__name__}", flush=True)
        part(fakes)
    return fakes.figures
