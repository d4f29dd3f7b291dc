"""What stage 0 is sent: the request's prompt as its pipeline's transform sees it, and its
companions.

All of it is made before anything is sent; whatever fails on the way leaves nothing behind but
artifact directories, which the request owns from the moment that they exist.
"""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import msgspec

from omni_grpc.artifacts import Artifacts
from omni_grpc.ipc import Task
from omni_grpc.pipelines.expansions import Companion, ExpansionContext
from omni_grpc.pipelines.transforms import OWNED_KEYS, TransformContext
from omni_grpc.plan import Plan
from omni_grpc.replica import new_task_id
from omni_grpc.topology import StageNode
from omni_grpc.types import Message, Prompt, RequestOptions

DIFFUSION = ("diffusion", "live", "diffusers")
"""Engines whose prompt is taken as it is, and that have no preprocessing to tell of."""


class Submission:
    """One request's prompt, options and companions, and the tasks that carry them."""

    def __init__(self, plan: Plan, artifacts: Artifacts, deadline_at: float) -> None:
        self.prompt = plan.request.prompt
        """Stage 0's view of it."""
        self.transform_ms = 0.0
        self._plan = plan
        self._artifacts = artifacts
        self._deadline_at = deadline_at
        self._options = plan.request.options

    async def transform(self) -> None:
        """Makes stage 0's view of prompt and options. A diffusion stage takes them as they are."""
        if self._plan.pipeline.entry.config.engine in DIFFUSION:
            return
        started = time.perf_counter()
        request_id = self._plan.request.request_id
        self.prompt, information = await self.view(self.prompt, request_id)
        if self._plan.pipeline.transform is not None:
            self.transform_ms = (time.perf_counter() - started) * 1e3
        self._options = msgspec.structs.replace(self._options, additional_information=information)

    async def view(self, prompt: Prompt, request_id: str) -> tuple[Prompt, dict[str, Any]]:
        """A prompt as stage 0 sees it, and the additional information that goes with it."""
        given = self._plan.request.options.additional_information or {}
        information = {k: v for k, v in given.items() if k not in OWNED_KEYS}
        information["global_request_id"] = request_id
        transform = self._plan.pipeline.transform
        if transform is None or prompt.empty:
            return prompt, information
        context = TransformContext(request_id, self._plan.params, self._artifacts, information)
        result = await asyncio.to_thread(transform, copy.deepcopy(prompt), context)
        for directory in result.artifact_directories:
            self._artifacts.adopt(directory)
        information |= result.additional_information
        # Also where the transform made a new mapping without it.
        information["global_request_id"] = request_id
        return result.prompt, information

    async def companions(self) -> list[Task]:
        """The tasks of the request's companions, in order: all of them, before anything is sent."""
        plan = self._plan
        if plan.pipeline.expansion is None or len(plan.needed) < 2:
            return []
        context = ExpansionContext(plan.request.request_id, plan.request.prompt, plan.params)
        return [
            await self._companion(number, companion)
            for number, companion in enumerate(plan.pipeline.expansion(context))
        ]

    async def _companion(self, number: int, companion: Companion) -> Task:
        request_id = f"{self._plan.request.request_id}#{companion.role}-{number}"
        prompt, information = await self.view(companion.prompt, request_id)
        params = self._plan.params[self._plan.pipeline.entry.name]
        return msgspec.structs.replace(
            self.task(self._plan.pipeline.entry, prompt),
            request_id=request_id,
            params=msgspec.structs.replace(params, **companion.overrides),
            options=msgspec.structs.replace(self._options, additional_information=information),
        )

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
            timeout_s=max(0.0, left),
            prompt=None if request.resumable else prompt,
            streaming=request.resumable or not entry,
            resumable=request.resumable,
            first_segment=first_segment,
            history=history,
            options=self._options if entry else RequestOptions(),
        )
