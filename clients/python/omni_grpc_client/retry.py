"""When a call that failed is made again: before anything of it came, and only where that helps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from omni_grpc_client.errors import OmniCallError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long, a refused call is tried again. Times in seconds.

    A call is made again only where nothing of it has come, so nothing ever comes twice: after
    `accepted` its failure is the caller's. Tried again is what the server says a retry can help
    (`OmniCallError.retry_after`: full, draining, a stage without a replica), not before that time;
    and a call that did not reach a server, or whose connection broke. What has failed for another
    reason would fail again.

    Waits grow from `first_wait` by `factor` up to `max_wait`, each made up to `jitter` longer (a
    part of itself) so that callers who were refused together don't return together. No attempt
    begins later than `total` after the first, nor where the call's own `timeout` would be over:
    then the last error is raised at once."""

    max_attempts: int = 4
    first_wait: float = 0.1
    factor: float = 2.0
    max_wait: float = 5.0
    jitter: float = 0.25
    total: float = 30.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts: there is at least one attempt")
        if min(self.first_wait, self.max_wait, self.jitter, self.total) < 0 or self.factor < 1:
            raise ValueError("times and jitter are 0 or more, factor is 1 or more")

    def wait(self, attempts: int, error: OmniCallError) -> float:
        """How long to wait after that many attempts, the last of which ended so."""
        wait = min(self.first_wait * self.factor ** (attempts - 1), self.max_wait)
        # What the server asks for is the least, however long.
        wait = max(wait, error.retry_after or 0.0)
        return wait * (1 + random.uniform(0, self.jitter))


LONGEST_S = 1e8
"""Three years: a longer timeout is none."""

NO_RETRY = RetryPolicy(max_attempts=1)


async def attempted(
    policy: RetryPolicy,
    timeout: float | None,
    attempt: Callable[[float | None], Awaitable[T]],
) -> T:
    """What an attempt gives, made again as the policy says.

    `attempt` takes the seconds that are left of `timeout`, and returns with the call's first
    answer. Raises the last attempt's OmniCallError. Cancelling ends the attempt or the wait."""
    if timeout is not None and not timeout < LONGEST_S:
        # gRPC would take it for a moment in the past.
        timeout = None
    clock = asyncio.get_running_loop().time
    begun, broken = clock(), False
    for number in range(1, policy.max_attempts + 1):
        try:
            return await attempt(_left(timeout, clock() - begun))
        except OmniCallError as error:
            wait = policy.wait(number, error)
            late = clock() - begun + wait > min(policy.total, timeout or policy.total)
            if number == policy.max_attempts or late or not _helps(error, broken):
                raise
            broken = broken or _is_broken(error)
        await asyncio.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _left(timeout: float | None, spent: float) -> float | None:
    return None if timeout is None else max(timeout - spent, 0.0)


def _helps(error: OmniCallError, broken: bool) -> bool:
    if error.retry_after is not None or _is_broken(error):
        return True
    # The attempt whose connection broke had arrived, and is still being put away.
    return broken and error.reason == "DUPLICATE_REQUEST"


def _is_broken(error: OmniCallError) -> bool:
    """Whether gRPC says so, and not the server, which gives a reason and says what helps."""
    return error.code == "UNAVAILABLE" and not error.reason and not error.final
