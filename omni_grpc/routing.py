"""Where a stage's outputs go: to the client if the stage is final, and over bridges to the stages
that take them; and when the stages pause because what they give is not taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omni_grpc.delivery import Delivery
from omni_grpc.graph import Graph
from omni_grpc.plan import Plan
from omni_grpc.report import Report
from omni_grpc.stage_run import StageRun
from omni_grpc.task import TaskHandle
from omni_grpc.types import (
    Event,
    FinishReason,
    Output,
    Payload,
    Progress,
    Prompt,
    SegmentEnd,
    StageOutput,
    StageProgress,
    Tensors,
    TextDelta,
)


class Routing:
    """One request's outputs on their ways. `start` submits a stage's task with its first prompt;
    `touched` hears of every answer."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        delivery: Delivery,
        report: Report,
        start: Callable[[StageRun, Prompt], TaskHandle],
        touched: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._graph = graph
        self._delivery = delivery
        self._report = report
        self._start = start
        self._touched = touched
        """Stages that have given the client something."""

    def route(self, stage: StageRun, output: StageOutput) -> None:
        """Sends everything that is in one output of a stage on its way."""
        if output.usage is not None:
            self._report.usage += output.usage
        if output.payload is not None:
            self._route(stage, output.payload, output.index, output.segment)
        if output.progress is not None:
            stage.progress = Progress(output.progress.step, output.progress.total_steps)
            self.put(StageProgress(stage.node.name, output.progress))
        if output.finish is not None:
            self._report.finish(stage.node.name, output.index, output.finish)
            if output.segment_end:
                self._segment_ended(stage, output.segment, output.finish.reason)

    def route_text(self, stage: StageRun, delta: TextDelta) -> None:
        """Sends plain text of a stage's first answer on its way."""
        self._route(stage, delta, 0, 0)

    def _route(self, stage: StageRun, payload: Payload, index: int, segment: int) -> None:
        self._remember(stage, segment, payload)
        if stage.final:
            self._emit(stage, payload, index, segment)
        if index == 0:
            for consumer, bridge in stage.consumers:
                self._hand_on(consumer, bridge.push(payload))

    def _remember(self, stage: StageRun, segment: int, payload: Payload) -> None:
        if stage.memory is not None and isinstance(payload, TextDelta):
            stage.memory.answer(payload.text)
        if isinstance(payload, Tensors):
            self._delivery.timeline.speak(segment, payload)

    def _emit(self, stage: StageRun, payload: Payload, index: int, segment: int) -> None:
        assert stage.node.config.output is not None
        self._report.output(stage.node.name, stage.node.config.output, payload)
        self._touched()
        for content in stage.cutter.cut(payload):
            self.put(Output(stage.node.name, index, segment, content))

    def _segment_ended(self, stage: StageRun, segment: int, reason: FinishReason) -> None:
        self._touched()
        self._report.pace.answered(stage.node.name)
        stage.answered += 1
        if stage.memory is not None:
            stage.memory.close()
        self.put(SegmentEnd(segment, stage.node.name, reason))
        for consumer, bridge in stage.consumers:
            self._hand_on(consumer, bridge.finish())
            consumer.source_segment_ended(stage.node.name)

    def ended(self, stage: StageRun) -> None:
        """A stage has given everything: so have its bridges."""
        for consumer, bridge in stage.consumers:
            self._hand_on(consumer, bridge.finish())
            consumer.source_ended(stage.node.name)

    def join(self, stage: StageRun, outputs: list[tuple[str, list[Payload]]]) -> None:
        """A stage and its companions have given everything: handed on as one. Once."""
        for consumer, bridge in stage.consumers:
            join = getattr(bridge, "join", None)
            self._hand_on(consumer, join(outputs) if join is not None else bridge.finish())
            consumer.source_ended(stage.node.name)

    def _hand_on(self, stage: StageRun, items: Iterable[Payload | Prompt]) -> None:
        """Gives a stage its next input. Where there are no segments, a prompt is what a task
        begins with."""
        for item in items:
            if stage.memory is not None and isinstance(item, Prompt):
                stage.memory.ask(item)
            if not isinstance(item, Prompt):
                stage.feed(item)
            elif stage.handle is None and not self._plan.request.resumable:
                self._start(stage, item)
            else:
                stage.feed(prompt=item)

    # ------------------------------------------------------------ to the client

    def put(self, event: Event) -> None:
        """Adds an event to what the client reads."""
        self._delivery.put(event)
        if self._delivery.congested:
            self.regulate()

    def regulate(self) -> None:
        """Holds back the credit of stages that run ahead of the client or of a stage behind them,
        and gives it where nothing is in the way any more."""
        slow_client = not self._delivery.drained
        for stage in self._graph:
            if stage.handle is None or not stage.holds:
                continue
            ahead = any(consumer.congested for consumer, _ in stage.consumers)
            if slow_client or ahead:
                stage.handle.held = True
            elif stage.handle.held:
                stage.handle.release_credit()
