"""Ours beside the fronts that people use: one model, one machine, one run.

All fronts stand side by side; in each round each of them gets the same prompts, one after the
other, and ratios are taken within a round. A front whose streams did not all get all of their
tokens fails the run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fakes import percentile
from bench.load import Taken
from bench.servers import FRONTS, Front, Setting, running

SENTENCE = """the quick brown fox jumps over a lazy dog while seven green birds sing in old trees
near still water and nobody listens to them"""
WORDS = SENTENCE.split()
PROMPT_WORDS = 24
CHECKED_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Work:
    """How much is asked of each front: rounds, numbers of streams, tokens per stream."""

    rounds: int
    streams: Sequence[int]
    tokens: int


Rounds = dict[int, list[dict[str, Taken]]]
"""What came, by number of streams, round by round, by front."""


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of one length, no two alike."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=PROMPT_WORDS)) for _ in range(count)]


def measure(setting: Setting, work: Work, names: Sequence[str] = tuple(FRONTS)) -> dict[str, float]:
    """Every front's tokens per second, first tokens and gaps, and ours as ratios of theirs."""
    with running(setting, list(names)) as fronts:
        figures = {"texts_equal": float(_texts_equal(fronts))}
        rounds: Rounds = {}
        for count in work.streams:
            # Once without counting: pages, caches, pools.
            _round(fronts, count, work.tokens, seed=-count)
            rounds[count] = [
                _round(fronts, count, work.tokens, seed) for seed in range(work.rounds)
            ]
            _print(count, rounds[count])
    return figures | _absolute(rounds) | _ratios(rounds)


def _texts_equal(fronts: list[Front]) -> bool:
    """Whether all fronts that give text give the same for the same prompt."""
    asked = prompts(1, seed=1 << 20)
    texts = {front.name: front.load.run(asked, CHECKED_TOKENS).texts[0] for front in fronts}
    given = {text for text in texts.values() if text}
    if len(given) > 1:
        print(f"    texts differ: {texts}", flush=True)
    return len(given) <= 1


def _round(fronts: list[Front], count: int, tokens: int, seed: int) -> dict[str, Taken]:
    asked, taken = prompts(count, seed), {}
    for front in fronts:
        if front.process is not None:
            front.process.check()
        taken[front.name] = front.load.run(asked, tokens)
        if taken[front.name].short:
            raise RuntimeError(f"{front.name}: {taken[front.name].short} streams lack tokens")
    return taken


def rate(taken: Taken) -> float:
    """Tokens per second, from the first request's start to the last one's end."""
    return taken.tokens / (taken.ended - taken.started)


def first(taken: Taken) -> float:
    """Median time to first token, seconds."""
    return statistics.median(taken.first)


def _absolute(rounds: Rounds) -> dict[str, float]:
    middle, figures = statistics.median, dict[str, float]()
    for count, taken in rounds.items():
        for name in taken[0]:
            mine = [one[name] for one in taken]
            end = f"{name.replace('-', '_')}_{count}"
            figures |= {
                f"tokens_per_s_{end}": middle(map(rate, mine)),
                f"ttft_ms_p50_{end}": middle(first(one) for one in mine) * 1e3,
                f"ttft_ms_p99_{end}": middle(percentile(one.first, 99) for one in mine) * 1e3,
                f"gap_ms_p50_{end}": middle(percentile(one.gaps, 50) for one in mine) * 1e3,
                f"gap_ms_p99_{end}": middle(percentile(one.gaps, 99) for one in mine) * 1e3,
                f"messages_per_token_{end}": middle(one.messages / one.tokens for one in mine),
            }
    return figures


def _ratios(rounds: Rounds) -> dict[str, float]:
    figures: dict[str, float] = {}
    for count, taken in rounds.items():
        for other in [name for name in taken[0] if name != "omni" and "omni" in taken[0]]:
            key = other.replace("-", "_")
            rates = statistics.median(rate(one["omni"]) / rate(one[other]) for one in taken)
            firsts = statistics.median(first(one["omni"]) / first(one[other]) for one in taken)
            figures[f"tokens_vs_{key}_{count}"] = rates
            figures[f"ttft_vs_{key}_{count}"] = firsts
            if count == 1:
                figures[f"single_vs_{key}"] = rates
    return figures


def _print(count: int, taken: list[dict[str, Taken]]) -> None:
    for name in taken[0]:
        rates = statistics.median(rate(one[name]) for one in taken)
        firsts = statistics.median(first(one[name]) for one in taken) * 1e3
        print(
            f"    {count:4d} of {name:9s} {rates:8.0f} tokens/s, first {firsts:7.1f} ms", flush=True
        )
