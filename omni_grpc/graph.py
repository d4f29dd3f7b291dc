"""The stages of one request: which there are, who feeds whom, whose tasks replicas hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omni_grpc.companions import CompanionRun, Group
from omni_grpc.pipelines.bridges import BridgeContext
from omni_grpc.plan import Plan
from omni_grpc.stage_run import StageRun

if TYPE_CHECKING:
    from omni_grpc.run import Run


class Graph:
    """A request's StageRuns, in the order in which data flows, and its companions.

    `restart` puts new ones in their place for a new epoch; the old ones are only waited for.
    """

    def __init__(self, run: Run, plan: Plan) -> None:
        self.group = Group([])
        self._run = run
        self._plan = plan
        self._first = plan.pipeline.entry.name
        self._stages = {node.name: StageRun(run, node) for node in plan.needed}
        self._retired: list[StageRun | CompanionRun] = []
        self._connect()

    def _connect(self) -> None:
        for stage in self._stages.values():
            stage.final = stage.node in self._plan.finals
            stage.consumers = []
            for target in stage.node.consumers:
                if target in self._stages:
                    context = BridgeContext(
                        self._run.request_id, self._plan.request.prompt, stage.node.name, target
                    )
                    consumer = self._stages[target]
                    stage.consumers.append((consumer, consumer.node.bridge(context)))

    @property
    def entry(self) -> StageRun:
        """Stage 0."""
        return self._stages[self._first]

    def __iter__(self) -> Iterator[StageRun]:
        return iter(self._stages.values())

    def get(self, name: str) -> StageRun | None:
        """The stage of that name, if it runs."""
        return self._stages.get(name)

    @property
    def interactive(self) -> StageRun | None:
        """The stage that takes events, if one does."""
        return next((s for s in self if s.node.pool.facts.interactive), None)

    @property
    def done(self) -> bool:
        """Whether all stages whose outputs the client wants have ended."""
        return all(stage.ended for stage in self if stage.final)

    def holders(self) -> list[StageRun | CompanionRun]:
        """Whose tasks replicas still hold."""
        self._retired = [one for one in self._retired if one.holds]
        now = [stage for stage in self if stage.holds]
        return [*now, *(one for one in self.group.members if one.holds), *self._retired]

    def abort(self) -> None:
        """Asks every replica that holds something to let go."""
        for holder in self.holders():
            if holder.handle is not None:
                holder.handle.abort()

    def restart(self, keep: StageRun | None, segments: int) -> None:
        """New runs for all stages but `keep`, which begin with segment number `segments`."""
        old, self._stages = self._stages, {}
        self._retired = [one for one in self._retired if one.holds]
        for name, stage in old.items():
            if stage is keep:
                self._stages[name] = stage
                continue
            stage.retire()
            self._retired.append(stage)
            self._stages[name] = stage.successor(segments)
        self._connect()
