"""What `finished` tells of a request: why each answer ended, what was used, where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable

from omni_grpc.errors import Code, OmniError
from omni_grpc.metrics import Metrics
from omni_grpc.pace import Pace
from omni_grpc.stage_run import StageRun
from omni_grpc.types import Finish, Finished, Modality, Payload, StageFinish, Timings, Usage


class Report:
    """One request's account. Times in milliseconds from `arrived_at`, the request's arrival."""

    def __init__(self, metrics: Metrics, pipeline: str) -> None:
        self.arrived_at = time.perf_counter()
        self.pace = Pace(metrics, pipeline)
        self._metrics = metrics
        self._pipeline = pipeline
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

    def output(self, stage: str, modality: Modality, payload: Payload) -> None:
        """A final output of this modality came."""
        self.pace.output(stage, modality, payload)
        if modality.value not in self._first_output_ms:
            elapsed = (time.perf_counter() - self.arrived_at) * 1e3
            self._first_output_ms[modality.value] = elapsed

    def finish(self, stage: str, index: int, finish: Finish) -> None:
        """One answer of one stage ended; of several segments the last counts."""
        self._finishes[stage, index] = StageFinish(stage, index, finish)

    def ended(self, stages: Iterable[StageRun], error: OmniError | None) -> None:
        """The request, which had been accepted, ended: into the server's metrics."""
        metrics, pipeline, now = self._metrics, self._pipeline, time.perf_counter()
        cancelled = error is not None and error.code is Code.CANCELLED
        outcome = "cancelled" if cancelled else "failed" if error is not None else "finished"
        metrics.requests_of(pipeline, outcome).inc()
        metrics.queue_wait.labels(pipeline).add(self.queue_wait_ms / 1e3)
        for stage in stages:
            if stage.started_at is None:
                continue
            seconds = (stage.ended_at or now) - stage.started_at
            metrics.stage_seconds.labels(pipeline, stage.node.name).add(seconds)
            if stage.hop_s is not None:
                metrics.hop.labels(pipeline, stage.node.name).add(stage.hop_s)
        if error is None:
            self.pace.ended()

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
