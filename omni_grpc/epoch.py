"""What an interrupt does to a request: what was not written is withdrawn, the stages that work on
the answer begin anew, and a conversation remembers what was heard of it."""

from __future__ import annotations

from omni_grpc.conversation import Timeline
from omni_grpc.delivery import Delivery
from omni_grpc.feeding import Feeding
from omni_grpc.graph import Graph
from omni_grpc.lane import Lane
from omni_grpc.stage_run import StageRun
from omni_grpc.types import AudioFormat


def withdraw(graph: Graph, delivery: Delivery) -> None:
    """Begins the next epoch: outputs that wait are dropped, and do not count as delivered."""
    delivery.epoch += 1
    for output in delivery.withdraw():
        if stage := graph.get(output.stage):
            stage.cutter.withdraw(output.content)


def untouched(graph: Graph, lane: Lane | None) -> StageRun | None:
    """Stage 0, if it has no part in the present answer and need not begin anew."""
    entry = graph.entry
    if lane is None or entry.memory is not None or entry.answered < lane.segments:
        return None
    return entry


def restart(
    graph: Graph,
    delivery: Delivery,
    feeding: Feeding,
    keep: StageRun | None,
    played_ms: int | None,
) -> None:
    """New tasks for all stages but `keep`; they begin with the segment that is open. `played_ms` of
    the answer's sound were heard, None: all that was written."""
    said, segments = heard(graph, delivery.timeline, played_ms), feeding.lane.segments
    for stage in graph:
        if stage.memory is not None:
            stage.memory.cut(said, delivery.timeline.answer)
            stage.memory.next_answer = segments
    graph.restart(keep, segments)
    feeding.repeat(anew=keep is None)


def heard(graph: Graph, timeline: Timeline, played_ms: int | None) -> str | None:
    """The words of the answer that is spoken which were heard; None: what there is, all of it."""
    finals = (stage for stage in graph if stage.final)
    spoken = any(isinstance(s.node.pool.facts.output_format, AudioFormat) for s in finals)
    if not spoken or (played_ms is None and timeline.answer is None):
        return None
    return timeline.heard(timeline.delivered_ms if played_ms is None else float(played_ms))
