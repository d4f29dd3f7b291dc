"""The load generator: a process of its own, the same for every front.

    python -m bench.load PROTOCOL PROMPT

It reads lines and answers each with one: first the target (answered when one request for PROMPT was
served), then any number of `Order`s as JSON, answered with `Taken`. Several of them run side by
side for one load; their clocks are one (CLOCK_MONOTONIC)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop

from bench.protocols import PROTOCOLS, Adapter

READY_TIMEOUT_S = float(os.environ.get("BENCH_READY_S", "300"))
ORDER_TIMEOUT_S = 300.0
TICK_S = 0.1


class Order(msgspec.Struct, frozen=True):
    """Streams to run at once, one per prompt, `tokens` tokens each."""

    prompts: list[str]
    tokens: int


class Taken(msgspec.Struct, frozen=True):
    """What came of an order. Times in seconds; `short`: streams that did not get all their tokens;
    `rate`: messages and tokens that came in each TICK_S, by its number."""

    started: float
    ended: float
    first: list[float]
    gaps: list[float]
    tokens: int
    messages: int
    short: int
    texts: list[str]
    rate: dict[int, tuple[int, int]] = {}

    def between(self, start: float, end: float) -> tuple[int, int]:
        """Messages and tokens that came from one time to another, to a tick."""
        ticks = [n for n in self.rate if start / TICK_S <= n < end / TICK_S]
        return sum(self.rate[n][0] for n in ticks), sum(self.rate[n][1] for n in ticks)


async def _stream(adapter: Adapter, prompt: str, order: Order, taken: Taken) -> tuple[int, int]:
    begun = last = time.monotonic()
    tokens, messages, texts = 0, 0, []
    async for piece in adapter.stream(prompt, order.tokens):
        now = time.monotonic()
        if messages:
            taken.gaps.append(now - last)
        else:
            taken.first.append(now - begun)
        last = now
        tick = int(now / TICK_S)
        count, sum_ = taken.rate.get(tick, (0, 0))
        taken.rate[tick] = (count + 1, sum_ + piece.tokens)
        messages += 1
        tokens += piece.tokens
        texts.append(piece.text)
    taken.texts.append("".join(texts))
    return tokens, messages


async def carry_out(adapter: Adapter, order: Order) -> Taken:
    """Runs an order's streams; all begin at once."""
    started = time.monotonic()
    taken = Taken(started, 0.0, [], [], 0, 0, 0, [], {})
    counts = await asyncio.gather(*(_stream(adapter, one, order, taken) for one in order.prompts))
    return msgspec.structs.replace(
        taken,
        ended=time.monotonic(),
        tokens=sum(tokens for tokens, _ in counts),
        messages=sum(messages for _, messages in counts),
        short=sum(tokens != order.tokens for tokens, _ in counts),
    )


async def _served(adapter: Adapter, prompt: str) -> None:
    """Returns when a first request is served: servers listen before they are ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            await carry_out(adapter, Order([prompt], 2))
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def _main(protocol: str, prompt: str) -> None:
    from bench import voice

    adapters = PROTOCOLS | voice.PROTOCOLS
    adapter, answers = adapters[protocol](), os.fdopen(os.dup(1), "wb", buffering=0)
    # Engines print; what they print is no answer.
    os.dup2(2, 1)
    await adapter.open(sys.stdin.readline().strip())
    try:
        await _served(adapter, prompt)
        answers.write(b"\n")
        for line in sys.stdin.buffer:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                taken = await carry_out(adapter, msgspec.json.decode(line, type=Order))
            answers.write(msgspec.json.encode(taken) + b"\n")
    finally:
        await adapter.close()


class Load:
    """Load generators for one front, as processes. Close it, also on errors."""

    def __init__(
        self,
        protocol: str,
        target: str,
        processes: int,
        environment: Mapping[str, str],
        log: Path,
        prompt: str = "ready?",
    ) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench.load", protocol, prompt],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=dict(environment),
                    start_new_session=True,
                )
                for _ in range(processes)
            ]
        for process in self.processes:
            self._write(process, target.encode())

    def ready(self) -> None:
        """Returns when each of them was served once."""
        for process in self.processes:
            self._read(process)

    def run(self, prompts: Sequence[str], tokens: int) -> Taken:
        """One stream per prompt, spread over the processes, to its end."""
        self.begin(prompts, tokens)
        return self.wait()

    def begin(self, prompts: Sequence[str], tokens: int) -> None:
        """Starts what `wait` waits for."""
        count = min(len(self.processes), len(prompts))
        self._busy = self.processes[:count]
        for place, process in enumerate(self._busy):
            order = Order(list(prompts[place::count]), tokens)
            self._write(process, msgspec.json.encode(order))

    def wait(self) -> Taken:
        """What came of the order that was begun."""
        return _joined([msgspec.json.decode(self._read(one), type=Taken) for one in self._busy])

    def _write(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a load generator ended with {process.wait()}:\n{tail}")
        return line

    def kill(self) -> None:
        """Ends them in the midst of their work."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Ends them when their work is done."""
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def _joined(parts: list[Taken]) -> Taken:
    rate: dict[int, tuple[int, int]] = {}
    for part in parts:
        for tick, (messages, tokens) in part.rate.items():
            before = rate.get(tick, (0, 0))
            rate[tick] = (before[0] + messages, before[1] + tokens)
    return Taken(
        min(part.started for part in parts),
        max(part.ended for part in parts),
        [value for part in parts for value in part.first],
        [value for part in parts for value in part.gaps],
        sum(part.tokens for part in parts),
        sum(part.messages for part in parts),
        sum(part.short for part in parts),
        [text for part in parts for text in part.texts],
        rate,
    )


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2]))
