"""Control calls: an operator's command to a stage or to some of its replicas, each reported
apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from omni_grpc.errors import (
    InternalError,
    InvalidField,
    NotSupported,
    OmniError,
    StageUnavailable,
)
from omni_grpc.pool import Slot, StagePool
from omni_grpc.topology import Pipeline

CALL_TIMEOUT_S = 60.0

Results = list[tuple[int, OmniError | None]]


class Controls:
    """All stages of a server, by "stage", or "pipeline/stage" where a name is not unique."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        self._pools: dict[str, StagePool] = {}
        by_stage: dict[str, list[StagePool]] = {}
        for pipeline in pipelines.values():
            for name, node in pipeline.stages.items():
                self._pools[f"{pipeline.name}/{name}"] = node.pool
                if node.pool not in by_stage.setdefault(name, []):
                    by_stage[name].append(node.pool)
        self._pools |= {name: pools[0] for name, pools in by_stage.items() if len(pools) == 1}

    def pause(self, stage: str, replicas: tuple[int, ...], *, paused: bool) -> Results:
        """Stops or lets come new work. What runs is not touched."""
        slots = self._slots(stage, replicas)
        for slot in slots:
            slot.paused = paused
        self._pools[stage].changed()
        return [(slot.number, None) for slot in slots]

    async def call(
        self, stage: str, replicas: tuple[int, ...], command: str, arguments: dict[str, Any]
    ) -> Results:
        """Carries out a command in each replica at once; one that fails does not stop the
        others."""
        slots = self._slots(stage, replicas)
        errors = await asyncio.gather(*(_call(slot, command, arguments) for slot in slots))
        return [(slot.number, error) for slot, error in zip(slots, errors, strict=True)]

    async def sleep(self, stage: str, replicas: tuple[int, ...], level: int) -> Results:
        """Keeps new work away, lets what runs finish, and puts to sleep. A replica that cannot
        sleep takes work as before."""
        slots = self._slots(stage, replicas)
        errors = await asyncio.gather(*(_sleep(slot, level) for slot in slots))
        self._pools[stage].changed()
        return [(slot.number, error) for slot, error in zip(slots, errors, strict=True)]

    async def wake(self, stage: str, replicas: tuple[int, ...]) -> Results:
        """Wakes, and lets new work come to those that woke."""
        slots = self._slots(stage, replicas)
        results = await self.call(stage, replicas, "wake", {})
        for slot, (_, error) in zip(slots, results, strict=True):
            slot.paused = slot.paused and error is not None
        self._pools[stage].changed()
        return results

    async def load_lora(
        self, stage: str, replicas: tuple[int, ...], name: str, path: str
    ) -> Results:
        """Loads an adapter. Known to requests, and to replicas to come, if every replica took
        it."""
        pool = self._pool(stage)
        results = await self.call(stage, replicas, "load_lora", {"name": name, "path": path})
        if not replicas and all(error is None for _, error in results):
            pool.adapters[name] = path
        return results

    async def unload_lora(self, stage: str, replicas: tuple[int, ...], name: str) -> Results:
        """Unloads an adapter. Requests for it are refused from now on."""
        pool = self._pool(stage)
        if name not in pool.adapters:
            raise InvalidField("name", f"stage {stage!r} has no adapter {name!r}")
        if not replicas:
            del pool.adapters[name]
        return await self.call(stage, replicas, "unload_lora", {"name": name})

    def _pool(self, stage: str) -> StagePool:
        if stage not in self._pools:
            known = ", ".join(sorted(self._pools))
            raise InvalidField("target.stage", f"{stage!r} is not one of {known}")
        return self._pools[stage]

    def _slots(self, stage: str, replicas: Iterable[int]) -> list[Slot]:
        slots = self._pool(stage).slots
        wanted = list(replicas)
        for place, number in enumerate(wanted):
            if number >= len(slots):
                raise InvalidField(f"target.replicas[{place}]", f"must be below {len(slots)}")
        return [slots[number] for number in dict.fromkeys(wanted)] if wanted else list(slots)


async def _sleep(slot: Slot, level: int) -> OmniError | None:
    was_paused, slot.paused = slot.paused, True
    error = await _idle(slot) or await _call(slot, "sleep", {"level": level})
    if error is not None:
        slot.paused = was_paused
    return error


async def _idle(slot: Slot) -> OmniError | None:
    """Waits until the replica holds no task. What is wrong if it goes on for too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while slot.replica is not None and slot.replica.running:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            return None
    return NotSupported(f"replica {slot.number} still works after {CALL_TIMEOUT_S:g} s")


async def _call(slot: Slot, command: str, arguments: dict[str, Any]) -> OmniError | None:
    if slot.replica is None or not slot.ready:
        return StageUnavailable(f"replica {slot.number} does not serve")
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await slot.replica.control(command, arguments)
    except OmniError as error:
        return error
    except TimeoutError:
        return InternalError(f"no answer within {CALL_TIMEOUT_S:g} s")
    return None
