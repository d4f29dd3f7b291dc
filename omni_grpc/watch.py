"""The clocks of one request: its deadline, the silence of its stages and towards its client, the
absence of its input."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from omni_grpc.delivery import Delivery
from omni_grpc.errors import DeadlineExceeded, InputTimeout, OmniError, StageTimeout
from omni_grpc.graph import Graph
from omni_grpc.lane import Lane
from omni_grpc.plan import Plan
from omni_grpc.stage_run import StageRun
from omni_grpc.types import StageProgress

GROUP_TIMEOUT_S = 120.0
"""Longest wait of a request for its companions, once its own stage 0 has ended."""


EARLY_S = 0.001
"""How much too early a timer may be: the loop's own clock counts milliseconds."""


class Watch:
    """Ends the request (`close`) when something takes too long. All clocks share one timer, which
    is set for the first of them; `stop` stops them all."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        delivery: Delivery,
        lane: Lane | None,
        close: Callable[[OmniError], None],
    ) -> None:
        self._plan = plan
        self._graph = graph
        self._delivery = delivery
        self._lane = lane
        self._close = close
        self._loop = asyncio.get_running_loop()
        now = self._touched_at = self._loop.time()
        self.deadline_at = now + plan.timeout_s
        self._resting = False
        self._clocks: dict[str, tuple[float, Callable[[], None]]] = {
            "deadline": (self.deadline_at, self.expire),
            "silence": (now + self._silence_step(), self._watch_silence),
            "quiet": (now + plan.progress_s, self._watch_quiet),
        }
        """When each is due, and what it calls then."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._arm()

    def _later(self, name: str, delay: float, call: Callable[[], None]) -> None:
        self._clocks[name] = (self._loop.time() + delay, call)
        self._arm()

    def _arm(self) -> None:
        """The timer comes with the first clock, or before."""
        first = min((due for due, _ in self._clocks.values()), default=math.inf)
        if first < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(first, self._look), first

    def _look(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time() + EARLY_S
        for name, (due, call) in list(self._clocks.items()):
            # One that came before may have ended the request.
            if due <= now and name in self._clocks:
                del self._clocks[name]
                call()
        self._arm()

    def rest(self) -> None:
        """All outputs are there: only the deadline counts, for their reader."""
        self._resting = True
        self._clocks = {name: one for name, one in self._clocks.items() if name == "deadline"}

    def stop(self) -> None:
        """The request ended: nothing is too late any more."""
        self._resting = True
        self._clocks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    @property
    def timers(self) -> list[str]:
        """The clocks that run."""
        return list(self._clocks)

    def expire(self) -> None:
        """The deadline passed."""
        self._close(DeadlineExceeded("the request's deadline passed"))

    def touched(self) -> None:
        """Input came, or an answer."""
        self._touched_at = self._loop.time()

    # ------------------------------------------------------------ stages

    def _silence_step(self) -> float:
        return min(node.config.stage_timeout for node in self._plan.needed) / 4

    def _watch_silence(self) -> None:
        """Ends a request of which a stage that has input to work on has said nothing for its
        `stage_timeout`."""
        now = self._loop.time()
        for stage in self._graph:
            limit = stage.node.config.stage_timeout
            if self._works(stage) and now - stage.heard_at > limit:
                name = stage.node.name
                self._close(StageTimeout(f"stage {name!r} gave nothing for {limit:g} s"))
                return
        self._later("silence", self._silence_step(), self._watch_silence)

    def _works(self, stage: StageRun) -> bool:
        """Whether it is this stage's turn: it holds a task, is not held back, and waits neither for
        a place nor for another stage nor for the client."""
        if not stage.holds or stage.handle is None or stage.handle.held or stage.handle.waits:
            return False
        if stage is self._graph.entry:
            return self._lane is None or self._lane.answering(stage.answered)
        return stage.input_complete or stage.congested

    def group(self) -> None:
        """Stage 0 has ended: its companions may not take for ever."""
        self._later("group", GROUP_TIMEOUT_S, self._group_late)

    def _group_late(self) -> None:
        if not self._graph.group.handed_on:
            self._close(StageTimeout("guidance companions did not finish in time"))

    # ------------------------------------------------------------ the client

    def _watch_quiet(self) -> None:
        """Gives a client that has read everything a sign of life, where there was nothing else for
        `progress_s`: what lies between closes streams that are idle. Nothing goes before the
        request's admission."""
        limit, taken_at = self._plan.progress_s, self._delivery.taken_at
        quiet = 0.0 if taken_at is None else self._loop.time() - taken_at
        if quiet >= limit and not len(self._delivery):
            stage = next((stage for stage in self._graph if not stage.ended), self._graph.entry)
            self._delivery.put(StageProgress(stage.node.name, stage.progress))
            quiet = 0.0
        self._later("quiet", limit - quiet if quiet < limit else limit / 20, self._watch_quiet)

    # ------------------------------------------------------------ input

    def input(self) -> None:
        """Ends a request whose input stays away for `input_timeout` while nothing else happens.
        From now on."""
        if self._lane is None or self._lane.ended or self._resting:
            return
        limit = self._plan.pipeline.config.input_timeout
        idle = self._loop.time() - self._touched_at
        answering = any(stage.answered < self._lane.segments for stage in self._graph)
        if idle >= limit and self._lane.waits and not answering:
            self._close(InputTimeout(f"no input came for {limit:g} s"))
        else:
            self._later("input", max(limit - idle, limit / 20), self.input)
