"""What there is in a server: all that requests hold, and what it has in any case. When no request
runs, nothing is held; what is still listed then has leaked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omni_grpc.companions import CompanionRun
from omni_grpc.engine import Engine
from omni_grpc.pool import StagePool
from omni_grpc.run import TASK_PREFIX
from omni_grpc.task import TaskHandle

SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class Holding:
    """One thing that a request holds; `request_id` is empty where it is not known."""

    kind: str
    request_id: str
    detail: str

    def __str__(self) -> str:
        whose = f" of {self.request_id}" if self.request_id else ""
        return f"{self.kind}{whose} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Census:
    """All holdings, and how many there are of what the server has whether or not requests run."""

    holdings: tuple[Holding, ...]
    standing: Mapping[str, int]


def holdings(engine: Engine) -> Iterator[Holding]:
    """Everything that requests hold, each once for every place where it is counted."""
    for run in engine.orchestrator.statistics():
        state = ", ".join(f"{name} {value}" for name, value in run.items() if name != "request_id")
        yield Holding("request", str(run["request_id"]), state)
    for pool in engine.pools:
        yield from _of_pool(pool)
    for name, count in engine.budget.statistics().items():
        if count:
            yield Holding("budget", "", f"{count} {name}")
    for folder in engine.orchestrator.artifact_root.glob("*"):
        yield Holding("artifact directory", "", str(folder))
    for task in asyncio.all_tasks():
        if task.get_name().startswith(TASK_PREFIX):
            owner, _, what = task.get_name().removeprefix(TASK_PREFIX).rpartition(": ")
            yield Holding("asyncio task", owner, what)


def _of_pool(pool: StagePool) -> Iterator[Holding]:
    for handle in pool.places.tasks:
        yield _of_task(handle, "waiting ", f"stage {pool.config.name}")
    for slot in pool.slots:
        for handle in slot.replica.tasks if slot.replica is not None else ():
            yield _of_task(handle, "", f"replica {pool.config.name}/{slot.number}")


def _of_task(handle: TaskHandle, state: str, where: str) -> Holding:
    kind = "companion" if isinstance(handle.sink, CompanionRun) else "task"
    aborted = ", aborted" if handle.aborted_at is not None else ""
    return Holding(f"{state}{kind}", handle.request_id, f"{where}, number {handle.id}{aborted}")


def standing(engine: Engine) -> dict[str, int]:
    """How many there are of what the server has in any case, by kind."""
    replicas = [
        slot.replica.pid
        for pool in engine.pools
        for slot in pool.slots
        if slot.ready and slot.replica is not None
    ]
    tasks = [t for t in asyncio.all_tasks() if not t.get_name().startswith(TASK_PREFIX)]
    return {
        "asyncio tasks": len(tasks),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "replica processes": len(replicas),
        "shared memory segments": len(_segments([os.getpid(), *replicas])),
    }


def _segments(pids: Iterable[int]) -> set[str]:
    """The shared memory that these processes and those that they started have mapped."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it is gone
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if SHARED_MEMORY in line:
                    found.add(line[line.index(SHARED_MEMORY) :])
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            found |= _segments(int(child) for child in children.split() if pid != os.getpid())
    return found
