"""What `finished` tells of a request: why each answer ended, what was used, where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable

from omni_grpc.stage_run import StageRun
from omni_grpc.types import Finish, Finished, Modality, StageFinish, Timings, Usage


class Report:
    """One request's account. Times in milliseconds from `arrived_at`, the request's arrival."""

    def __init__(self) -> None:
        self.arrived_at = time.perf_counter()
        self.usage = Usage()
        self.preprocess_ms = 0.0
        self.transform_ms = 0.0
        self.queue_wait_ms = 0.0
        self._submitted_at = self.arrived_at
        self._first_output_ms: dict[str, float] = {}
        self._finishes: dict[tuple[str, int], StageFinish] = {}

    def submitted(self) -> None:
        """Stage 0 was sent the request."""
        self._submitted_at = time.perf_counter()

    def admitted(self, prepare_ms: float, *, told: bool) -> None:
        """Stage 0 has taken it. What its own preparation did not take was spent in the queue; of
        the preparation itself is `told` where it is preprocessing."""
        waited = (time.perf_counter() - self._submitted_at) * 1e3
        self.preprocess_ms = prepare_ms if told else 0.0
        self.queue_wait_ms = max(0.0, waited - prepare_ms)

    def output(self, modality: Modality) -> None:
        """A final output of this modality came."""
        if modality.value not in self._first_output_ms:
            elapsed = (time.perf_counter() - self.arrived_at) * 1e3
            self._first_output_ms[modality.value] = elapsed

    def finish(self, stage: str, index: int, finish: Finish) -> None:
        """One answer of one stage ended; of several segments the last counts."""
        self._finishes[stage, index] = StageFinish(stage, index, finish)

    def finished(self, stages: Iterable[StageRun]) -> Finished:
        """The request's last event."""
        now, stages = time.perf_counter(), list(stages)
        timings = Timings(
            preprocess_ms=self.preprocess_ms,
            transform_ms=self.transform_ms,
            queue_wait_ms=self.queue_wait_ms,
            stage_ms={
                stage.node.name: ((stage.ended_at or now) - stage.started_at) * 1e3
                for stage in stages
                if stage.started_at is not None
            },
            first_output_ms=dict(self._first_output_ms),
            total_ms=(now - self.arrived_at) * 1e3,
        )
        cutters = [stage.cutter for stage in stages if stage.final]
        delivered = Usage(
            audio_samples=sum(cutter.samples for cutter in cutters),
            frames=sum(cutter.frames for cutter in cutters),
        )
        return Finished(tuple(self._finishes.values()), self.usage + delivered, timings)
