"""What stage 0 is sent: the request's prompt as its pipeline's transform sees it, and its
companions.

All of it is made before anything is sent; whatever fails on the way leaves nothing behind but
artifact directories, which the request owns from the moment that they exist.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from omni_grpc.artifacts import Artifacts
from omni_grpc.errors import NotSupported, Violation
from omni_grpc.ipc import Task
from omni_grpc.pipelines.expansions import Companion, ExpansionContext
from omni_grpc.pipelines.transforms import (
    OWNED_KEYS,
    Transform,
    TransformContext,
    Transformed,
)
from omni_grpc.plan import Plan
from omni_grpc.task import new_task_id
from omni_grpc.topology import StageNode
from omni_grpc.types import Message, Params, Prompt, RequestOptions

DIFFUSION = ("diffusion", "live", "diffusers")
"""Engines whose prompt is taken as it is, and that have no preprocessing to tell of."""

Value = TypeVar("Value")


class Submission:
    """One request's prompt, options and companions, and the tasks that carry them."""

    def __init__(self, plan: Plan, artifacts: Artifacts, deadline_at: float) -> None:
        self.prompt = plan.request.prompt
        """Stage 0's view of it."""
        self.transform_ms = 0.0
        """What transforms have taken so far."""
        self._plan = plan
        self._artifacts = artifacts
        self._deadline_at = deadline_at
        self._options = plan.request.options

    @property
    def waits(self) -> bool:
        """Whether there is anything to wait for: a transform works in a thread, and the companions
        that an expansion makes go through it too."""
        return self._plan.pipeline.transform is not None

    async def transform(self) -> None:
        """Makes stage 0's view of prompt and options."""
        request_id = self._plan.request.request_id
        self.prompt, information = await self.view(self.prompt, request_id, self._artifacts)
        self._options = msgspec.structs.replace(
            self._options, additional_information=information or None
        )

    async def view(
        self, prompt: Prompt, request_id: str, artifacts: Artifacts
    ) -> tuple[Prompt, dict[str, Any]]:
        """A prompt as stage 0 sees it, and the additional information that goes with it. A
        diffusion stage takes both as they are, but for the keys that no client sets."""
        information: dict[str, Any] = {}
        if given := self._plan.request.options.additional_information:
            information = copy.deepcopy({k: v for k, v in given.items() if k not in OWNED_KEYS})
        if self._plan.pipeline.entry.config.engine in DIFFUSION:
            return prompt, information
        information["global_request_id"] = request_id
        transform = self._plan.pipeline.transform
        if transform is None or prompt.empty:
            return prompt, information
        started = time.perf_counter()
        context = TransformContext(request_id, self._plan.params, artifacts, information)
        work = partial(transformed, transform, prompt, context)
        result = await asyncio.to_thread(artifacts.use, work)
        self.transform_ms += (time.perf_counter() - started) * 1e3
        # Also where the transform made a new mapping without it.
        added = result.additional_information | {"global_request_id": request_id}
        return result.prompt, information | added

    async def companions(self) -> list[tuple[str, Task]]:
        """(role, task) of the request's companions, in order: all of them, before anything is
        sent."""
        plan = self._plan
        if plan.pipeline.expansion is None or len(plan.needed) < 2:
            return []
        prompt, params = copy.deepcopy((plan.request.prompt, plan.params))
        context = ExpansionContext(plan.request.request_id, prompt, params)
        companions = list(plan.pipeline.expansion(context))
        if companions and plan.request.resumable:
            # Every segment would need its own.
            description = "guidance needs its whole prompt at once"
            violation = Violation("resumable", description)
            raise NotSupported(f"resumable: {description}", violations=(violation,))
        return [
            (companion.role, await self._companion(number, companion))
            for number, companion in enumerate(companions)
        ]

    async def _companion(self, number: int, companion: Companion) -> Task:
        request_id = f"{self._plan.request.request_id}#{companion.role}-{number}"
        given = portable(companion.prompt, Prompt)
        prompt, information = await self.view(given, request_id, self._artifacts)
        params = self._plan.params[self._plan.pipeline.entry.name]
        changed = msgspec.structs.replace(params, **companion.overrides)
        return msgspec.structs.replace(
            self.task(self._plan.pipeline.entry, prompt),
            request_id=request_id,
            params=portable(changed, Params),
            options=msgspec.structs.replace(
                self._options, additional_information=information or None
            ),
        )

    def again(self, task: Task) -> Task:
        """The same task for another replica, under a new id."""
        left = self._deadline_at - asyncio.get_running_loop().time()
        return msgspec.structs.replace(task, id=new_task_id(), timeout_s=max(0.0, left))

    def task(
        self,
        node: StageNode,
        prompt: Prompt | None,
        first_segment: int = 0,
        history: tuple[Message, ...] = (),
    ) -> Task:
        """A stage's task. What is left of the deadline is counted from now."""
        request, entry = self._plan.request, node is self._plan.pipeline.entry
        left = self._deadline_at - asyncio.get_running_loop().time()
        return Task(
            id=new_task_id(),
            request_id=request.request_id,
            params=self._plan.params[node.name],
            # Text that another stage takes too goes on at once.
            joins=not any(other.name in node.consumers for other in self._plan.needed),
            timeout_s=max(0.0, left),
            prompt=None if request.resumable else prompt,
            streaming=request.resumable or not entry,
            resumable=request.resumable,
            first_segment=first_segment,
            history=history,
            options=self._options if entry else RequestOptions(),
        )


def transformed(transform: Transform, prompt: Prompt, context: TransformContext) -> Transformed:
    """What the transform makes of its own copies of everything. For a thread.

    Raises what it raises, and TypeError, ValueError or msgspec's errors where its result is none.
    """
    params, information = copy.deepcopy((context.params, context.additional_information))
    own = replace(context, params=params, additional_information=information)
    result = transform(copy.deepcopy(prompt), own)
    context.artifacts.adopt(result.artifact_directories)
    return replace(
        result,
        prompt=portable(result.prompt, Prompt),
        additional_information=portable(result.additional_information, dict[str, Any]),
    )


def portable(value: Value, kind: Any) -> Value:
    """The value as a replica will read it. Raises here what would break the replica there: msgspec
    checks types when it decodes only."""
    checked: Value = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    return checked
