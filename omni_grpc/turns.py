"""When a caller that was refused should come back: from how fast places have become free lately.

Every caller that is refused gets a turn of its own, one place after the other, so that they do not
all come back for the same one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RATE_WINDOW_S = 10.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
TURNS_S = 10.0
"""How far ahead turns are given. Of those that are told to wait for long, few come back."""
UNKNOWN_RETRY_S = 1.0
"""When to come back while nothing has ended yet."""


class Turns:
    """The measured drain rate of something that is full at times, and the turns that it gives.
    `clock` gives seconds; only time in which there is work counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._busy_before = 0.0
        self._busy_since = clock()
        self._ended: deque[float] = deque()
        self._last_ended = 0.0
        self._last_turn = 0.0

    def began(self) -> None:
        """A place was taken."""
        if not self._running:
            self._busy_since = self._clock()
        self._running += 1

    def ended(self) -> None:
        """A place has become free."""
        self._last_ended = self._busy()
        self._ended.append(self._last_ended)
        self._forget()
        self._running -= 1
        if not self._running:
            self._busy_before = self._last_ended

    def _busy(self) -> float:
        """Seconds in which there was work, so far."""
        return self._busy_before + (self._clock() - self._busy_since if self._running else 0.0)

    def _forget(self) -> None:
        horizon = self._busy() - RATE_WINDOW_S
        while self._ended and self._ended[0] < horizon:
            self._ended.popleft()

    def step_s(self) -> float:
        """The time in which one place becomes free, lately. Where none has for a while, at least
        that while."""
        self._forget()
        if not self._ended:
            return max(UNKNOWN_RETRY_S, self._busy() - self._last_ended)
        return min(RATE_WINDOW_S, self._busy()) / len(self._ended)

    def next_s(self) -> float:
        """How long a caller that is refused now should wait; the next one waits longer."""
        now = self._clock()
        self._last_turn = min(max(now, self._last_turn), now + TURNS_S) + self.step_s()
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._last_turn - now))
