"""The benchmark: `python -m bench`, or `make bench`. Prints a table and writes JSON."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import curves, fakes, model, report, servers, versus, voice
from bench.processes import ROOT, environment
from omni_grpc.embedded import cache_root

FOLDER = ROOT / "bench"
PARTS = ("fakes", "curves", "fronts", "voice")


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="this part; repeatable; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="to see that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="side by side, medians are taken (default 5)")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 32, 128, 256], help="for the fronts"
    )
    parser.add_argument("--tokens", type=int, default=128, help="per stream, for the fronts")
    parser.add_argument(
        "--fronts", nargs="+", choices=list(servers.FRONTS), default=list(servers.FRONTS)
    )
    parser.add_argument("--generators", type=int, default=2, help="load processes per front")
    parser.add_argument("--seconds", type=float, help="of a window with fake stages (default 8)")
    parser.add_argument(
        "--cache", type=Path, default=cache_root() / "bench", help="models, logs, fronts"
    )
    parser.add_argument("--out", type=Path, help="default: bench/latest.json; a quick run's: cache")
    return parser.parse_args()


class Bench:
    """One run."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._quick: bool = asked.quick
        self._rounds: int = asked.rounds or (1 if self._quick else 5)
        self._cache: Path = asked.cache.resolve()
        self._logs = self._cache / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in self._logs.iterdir():
            old.unlink()

    def run(self) -> dict[str, float]:
        """Everything that was asked for, part by part."""
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "fakes": self._fakes,
            "curves": self._curves,
            "fronts": self._fronts,
            "voice": lambda: voice.measure(self._logs, self._rounds),
        }
        figures: dict[str, float] = {}
        for name in PARTS:
            if name in (self._asked.only or PARTS):
                print(f"==> {name}", flush=True)
                figures |= parts[name]()
        return figures

    def _bed(self) -> fakes.Fakes:
        seconds = self._asked.seconds or (0.5 if self._quick else 8.0)
        streams = 32 if self._quick else 256
        return fakes.Fakes(self._logs, seconds, self._rounds, streams, self._asked.generators)

    def _fakes(self) -> dict[str, float]:
        return fakes.measure(self._bed())

    def _curves(self) -> dict[str, float]:
        picture = (self._cache if self._quick else FOLDER) / "curves.svg"
        return curves.measure(self._bed(), picture, quick=self._quick)

    def _fronts(self) -> dict[str, float]:
        fronts = [str(FOLDER / "fronts"), str(self._cache / "fronts")]
        subprocess.run(fronts, check=True, env=environment(PYTHON=sys.executable))
        folder = model.prepare(self._cache)
        setting = servers.Setting(self._cache, self._logs, folder, self._asked.generators)
        work = versus.Work(self._rounds, self._asked.streams, self._asked.tokens)
        return versus.measure(setting, work, self._asked.fronts)

    def out(self) -> Path:
        """Where the figures go."""
        own: Path | None = self._asked.out
        return own or (self._cache / "quick.json" if self._quick else FOLDER / "latest.json")


def main() -> None:
    """Entry point."""
    bench = Bench(arguments())
    about = report.machine()
    figures = bench.run()
    report.show(figures)
    report.write(bench.out(), figures, about)
    print(f"written to {bench.out()}")


if __name__ == "__main__":
    main()
