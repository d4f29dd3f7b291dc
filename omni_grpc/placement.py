"""Where replicas run: devices by name, memory shares that must fit, one start at a time per
device."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction

from omni_grpc.config import StageConfig
from omni_grpc.errors import ConfigError


def devices_of(device: str) -> tuple[str, ...]:
    """The single devices that a replica's device names: "cuda:0,1" is two."""
    kind, _, numbers = device.partition(":")
    if kind != "cuda":
        return (device,)
    return tuple(f"cuda:{number.strip()}" for number in (numbers or "0").split(","))


def width_of(device: str) -> int:
    """Over how many devices a replica is spread (its tensor-parallel width)."""
    return len(devices_of(device))


def check_memory(stages: Iterable[StageConfig]) -> None:
    """Sums the stages' memory shares per device. Raises ConfigError that shows the arithmetic where
    a device would be given away more than once."""
    shares: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for stage in stages:
        if stage.memory_fraction is None:
            continue
        for replica in range(stage.replicas):
            for device in devices_of(stage.device(replica)):
                shares[device].append((f"{stage.name}/{replica}", stage.memory_fraction))
    for device, given in shares.items():
        # As fractions: ten times 0.1 is 1 and no more.
        total = sum(Fraction(str(share)) for _, share in given)
        if total > 1:
            terms = " + ".join(f"{share:g} ({name})" for name, share in given)
            raise ConfigError(f"memory of {device}: {terms} = {float(total):g}, more than 1")


class Starts:
    """Lets replicas that share a device start one after another: each measures what memory is free.
    The CPU is no such device."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def turn(self, device: str) -> AsyncIterator[None]:
        """Holds the replica's devices, in one order, so that no two wait for each other."""
        async with AsyncExitStack() as held:
            for name in sorted(devices_of(device)):
                if name.startswith("cuda"):
                    await held.enter_async_context(self._locks[name])
            yield
