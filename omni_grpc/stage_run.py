"""One stage's part in a request: the sink of its task, its sources, and the bridges behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omni_grpc.conversation import Conversation
from omni_grpc.cutter import Cutter
from omni_grpc.errors import InternalError, OmniError
from omni_grpc.ipc import WINDOW_BYTES, Task, payload_size
from omni_grpc.pipelines.bridges import Bridge
from omni_grpc.task import TaskHandle
from omni_grpc.topology import StageNode
from omni_grpc.types import Params, Payload, Progress, Prompt, StageOutput, TextDelta

if TYPE_CHECKING:
    from omni_grpc.run import Run

log = logging.getLogger(__name__)


class StageRun:
    """One stage of one Run.

    What a replica says of the task arrives here and is handled by the Run. Whatever goes wrong in
    handling one message ends this one request, and nothing else.
    """

    def __init__(self, run: Run, node: StageNode) -> None:
        self.node = node
        self.handle: TaskHandle | None = None
        self.holds = False
        """Whether the task is in a replica, or waits for a place in one."""
        self.admitted = False
        self.ended = False
        self.final = False
        self.consumers: list[tuple[StageRun, Bridge]] = []
        self.cutter = Cutter()
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.hop_s: float | None = None
        """How long its first input took to the replica, the wait of others before it included."""
        self.segment_params: dict[int, Params] = {}
        """Parameters of segments to come, by number."""
        self._run = run
        self._trace = run.trace.task(node.name, node.config.inputs)
        self._sources = dict.fromkeys(node.config.inputs, 0)
        """Segments that each source has ended."""
        self._open_sources = set(node.config.inputs)
        self._segment = 0
        self._ahead = 0
        """Bytes that were fed and not yet taken, but for the last CREDIT_STEP or so."""
        self.heard_at = 0.0
        """When this stage was last given or gave something, by the loop's clock."""
        self.gave = False
        """Whether it has given anything."""
        self.retired = False
        self.memory = Conversation() if node.config.engine == "vllm" else None
        self.answered = 0
        """Segments that it has answered."""
        self.progress = Progress(0)
        """How far it has said that it is, without the preview."""

    @property
    def congested(self) -> bool:
        """Whether its sources should pause: more waits for it than a window."""
        return self._ahead > WINDOW_BYTES and not self.ended

    @property
    def input_complete(self) -> bool:
        """Whether all of its sources have ended."""
        return not self._open_sources

    def retire(self) -> None:
        """A new epoch begins without it: what its task still says is not heard."""
        self.retired = True
        if self.holds and self.handle is not None:
            self.handle.abort()

    def successor(self, segments: int) -> StageRun:
        """This stage in a new epoch: same counts of what was delivered, same memory, no task.
        `segments` segments are over."""
        new = StageRun(self._run, self.node)
        new.cutter, new.memory, new.started_at = self.cutter, self.memory, self.started_at
        new.segment_params = self.segment_params
        new.answered = new._segment = segments
        new._sources = dict.fromkeys(self._sources, segments)
        return new

    def began(self, handle: TaskHandle) -> None:
        """There is a task: a replica has it, or it waits for a place."""
        self.handle, self.holds = handle, True

    # ------------------------------------------------------------ input

    def feed(
        self,
        payload: Payload | None = None,
        *,
        prompt: Prompt | None = None,
        params: Params | None = None,
        end_of_segment: bool = False,
        end: bool = False,
        number: int | None = None,
    ) -> None:
        """Sends input, with the present segment's own parameters in front."""
        params = params or self.segment_params.pop(self._segment, None)
        self._segment += end_of_segment
        if end_of_segment and number is None and self.memory is not None:
            self.memory.asked()
        self.heard_at = asyncio.get_running_loop().time()
        if payload is not None and number is None:
            self._ahead += payload_size(payload)
            if self.congested:
                self._run.regulate()
        self._run.ensure_started(self).feed(
            payload,
            prompt=prompt,
            params=params,
            end_of_segment=end_of_segment,
            end=end,
            number=number,
        )

    def source_segment_ended(self, source: str) -> None:
        """A source has answered a segment; with the last one this stage's segment ends."""
        before = min(self._sources.values())
        self._sources[source] += 1
        if min(self._sources.values()) > before:
            self.feed(end_of_segment=True)

    def source_ended(self, source: str) -> None:
        """A source has given everything; with the last one this stage's input ends."""
        self._open_sources.discard(source)
        if not self._open_sources:
            self.feed(end=True)

    # ------------------------------------------------------------ the sink of its task

    def on_placed(self, task: Task, replica: int, device: str) -> Task:
        self.started_at = time.perf_counter()
        self.heard_at = asyncio.get_running_loop().time()
        return self._trace.sent(task, replica, device)

    def on_admitted(self, prepare_ms: float) -> None:
        if self.started_at is not None:
            self.hop_s = max(0.0, time.perf_counter() - self.started_at - prepare_ms / 1e3)
        self._trace.admitted(prepare_ms)
        self._contained(self._run.stage_admitted, self, prepare_ms)

    def on_refused(self, error: OmniError) -> None:
        self.holds = False
        self._trace.ended(error)
        self._contained(self._run.stage_refused, self, error)
        self._run.stage_released()

    def on_fed(self, number: int, error: OmniError | None) -> None:
        self._contained(self._run.stage_fed, self, number, error)

    def on_unsendable(self, error: OmniError) -> None:
        self._run.close(error)

    def on_taken(self, size: int) -> None:
        was_congested = self.congested
        self._ahead -= size
        if was_congested and not self.congested:
            self._contained(self._run.regulate)

    def on_output(self, output: StageOutput) -> None:
        self._contained(self._run.stage_output, self, output)

    def on_text(self, delta: TextDelta) -> None:
        self._contained(self._run.stage_text, self, delta)

    def on_ended(self, error: OmniError | None) -> None:
        self.holds = False
        self._trace.ended(error)
        self._contained(self._run.stage_ended, self, error)
        self._run.stage_released()

    def on_lost(self) -> None:
        self.holds = False
        self._trace.ended(lost=True)
        self._contained(self._run.stage_lost, self)
        self._run.stage_released()

    def _contained(self, handler: Callable[..., None], *arguments: Any) -> None:
        if self.retired:
            return
        try:
            handler(*arguments)
        except OmniError as error:
            self._run.close(error)
        except (Exception, asyncio.CancelledError):
            # Handlers do not wait: a CancelledError here leaked from a bridge.
            log.exception("request %s: stage %s", self._run.request_id, self.node.name)
            self._run.close(InternalError("internal error"))
