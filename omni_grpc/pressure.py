"""How long text waits for more of its own, by how busy the server is.

Most of the server's work is messages: text that shares one costs a fraction. So while the event
loop has time, each token leaves at once; the busier it is, the longer text waits in its replica.
Where an engine computes on the same processors and has taken them all, the loop counts as busy
sooner: its work would be taken from the engine's."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

TICK_S = 0.1
BUSY = 0.5
"""Share of the time from which on windows grow."""
CALM = 0.25
"""Share of the time below which they shrink."""
STEPS = 8
"""The smallest window is the largest one divided by this."""
TAKEN = 0.9
"""Share of the machine's processors in use from which on time is scarce."""
SCARCE = 5.0
"""How much more the loop's time counts then: what it does not need, engines there get."""


class KernelFile:
    """A file in which the kernel tells something, kept open to be read again and again."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        # Not every kernel tells.
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """Its beginning; nothing where there is no such file."""
        return b"" if self._file is None else os.pread(self._file, 256, 0)

    def close(self) -> None:
        """Closes it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ThreadClock(KernelFile):
    """Time in which a thread had something to do: it ran, or waited for a processor. Of the thread
    that makes it."""

    def __init__(self) -> None:
        super().__init__(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def seconds(self) -> float:
        """Seconds since the thread's start; where the kernel does not tell, only those it ran."""
        told = self.read().split()
        return (int(told[0]) + int(told[1])) / 1e9 if told else time.thread_time()


class MachineClock(KernelFile):
    """How much of the machine's processors is in use."""

    def __init__(self) -> None:
        super().__init__("/proc/stat")
        self._last = self._ticks()

    def share(self) -> float:
        """The share that was in use since the last call; 0 where nobody tells."""
        before, self._last = self._last, self._ticks()
        idle, total = self._last[0] - before[0], self._last[1] - before[1]
        return 1 - idle / total if total > 0 else 0.0

    def _ticks(self) -> tuple[int, int]:
        """Idle and all."""
        # "cpu  user nice system idle iowait irq softirq steal …", of all processors together.
        ticks = [int(one) for one in self.read().split(b"\n")[0].split()[1:9]]
        return (ticks[3] + ticks[4], sum(ticks)) if ticks else (0, 0)


def next_window(window_s: float, share: float, most_s: float) -> float:
    """The window after one of `window_s` in which the loop was busy for this share of the time."""
    least = most_s / STEPS
    if share > BUSY:
        return min(most_s, max(2 * window_s, least))
    if share < CALM:
        return window_s / 2 if window_s > least else 0.0
    return window_s


class Pressure:
    """Measures the event loop that it is started on, and tells `pace` how long text may wait: at
    least `least_s`, and up to `most_s` while the loop is busy."""

    def __init__(self, pace: Callable[[float], None], least_s: float, most_s: float) -> None:
        self._pace = pace
        self._least = least_s
        self._most = most_s
        self._window = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to measure."""
        self._pace(self._least)
        if self._most > self._least:
            self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        clock, machine = ThreadClock(), MachineClock()
        try:
            then, worked = time.monotonic(), clock.seconds()
            while True:
                await asyncio.sleep(TICK_S)
                now, work = time.monotonic(), clock.seconds()
                share = (work - worked) / (now - then)
                if machine.share() > TAKEN:
                    share *= SCARCE
                self._adjust(share)
                then, worked = now, work
        finally:
            clock.close()
            machine.close()

    def _adjust(self, share: float) -> None:
        window = next_window(self._window, share, self._most)
        if window != self._window:
            self._window = window
            self._pace(max(self._least, window))

    async def stop(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
