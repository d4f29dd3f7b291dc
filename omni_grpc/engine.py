"""From a Request to an admitted Run, or to the error that refuses it. Nothing is left of a request
that is refused.

What can be known without a model is checked here, before anything is bound; what only the model
knows (tokens, context, its own limits) is checked by stage 0's `prepare`, before the client hears
`accepted`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from omni_grpc.admission import (
    check_answers,
    check_guidance,
    check_options,
    check_prompt,
    check_resumable,
    media_bytes,
    requested_params,
    resolve_chunk,
)
from omni_grpc.balance import tokens
from omni_grpc.budget import Budget, Share
from omni_grpc.config import ServerConfig
from omni_grpc.errors import DeadlineExceeded, Draining, NotResumable, PipelineNotFound
from omni_grpc.lane import Chunk, Feeder, Lane, Summary
from omni_grpc.metrics import Metrics
from omni_grpc.orchestrator import AbortOutcome, Orchestrator
from omni_grpc.outbox import Outbox
from omni_grpc.params import merge
from omni_grpc.plan import Plan
from omni_grpc.pool import SlotStatistics, StagePool
from omni_grpc.run import Run, owned_task
from omni_grpc.topology import Pipeline
from omni_grpc.types import GoingAway, Request, UpdateChunk

ABORT_TIMEOUT_S = 5.0
DRAIN_RETRY_S = 1.0
"""When to come back after a server that stops: to another one, or to the one in its place."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Load of one stage."""

    pipelines: tuple[str, ...]
    stage: str
    replicas: list[SlotStatistics]
    waiting: int
    """Requests that wait in the server for a place in one of them."""


class Engine:
    """The service without gRPC: submit, find, abort, tell."""

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        default: str,
        settings: ServerConfig,
        artifact_root: Path,
    ) -> None:
        self.pipelines = pipelines
        self.default = default
        self.settings = settings
        self.metrics = Metrics()
        self.orchestrator = Orchestrator(
            partial(Outbox, settings.queue_bytes),
            artifact_root,
            self.metrics,
            by_tenant=settings.auth is not None,
        )
        self.budget = Budget(settings)
        self.draining = False
        self._users = _users(pipelines.values())

    # ------------------------------------------------------------ requests

    async def submit(self, request: Request) -> Run:
        """Admits a request: it is enqueued when this returns, and its outputs come from the Run.

        Raises OmniError where it is refused. Whatever is raised, cancellation included, nothing of
        it is left."""
        if self.draining:
            raise Draining("the server is about to stop", retry_after_s=DRAIN_RETRY_S)
        if request.timeout_s is not None and request.timeout_s <= 0:
            raise DeadlineExceeded("the deadline had passed before the request came")
        plan = self.plan(request)
        for node in plan.needed:
            node.pool.check_loaded()
        # Before anything is made for it: to be refused must cost little.
        plan.pipeline.entry.pool.places.check_room()
        share = _share(plan)
        self.budget.take(share)
        try:
            run = self.orchestrator.open(plan, partial(self.budget.give, share))
        except BaseException:
            # A bridge of the user's own may raise anything when it is made.
            self.budget.give(share)
            raise
        await run.admit()
        return run

    def plan(self, request: Request) -> Plan:
        """The request checked against its pipeline. Binds nothing."""
        pipeline = self._pipeline(request.pipeline)
        finals, needed = pipeline.way(request.output_modalities, "output_modalities")
        check_prompt(request, pipeline)
        check_options(request.options, pipeline.entry)
        check_guidance(request.prompt, needed)
        requested, paths = requested_params(request.stage_params, pipeline, "stage_params")
        params = {}
        for node in pipeline.stages.values():
            path = paths.get(node.name, f"stage_params({node.name})")
            params[node.name] = merge(
                node.defaults, requested.get(node.name), node.constraints, path
            )
            check_answers(params[node.name], node, needed, path)
        if request.resumable:
            check_resumable(needed, params, paths)
        limit = pipeline.config.max_duration
        return Plan(
            request=request if request.request_id else _named(request),
            pipeline=pipeline,
            finals=finals,
            needed=needed,
            params=params,
            timeout_s=min(limit, request.timeout_s) if request.timeout_s is not None else limit,
            params_paths=paths,
            progress_s=self.settings.progress_interval,
        )

    def _pipeline(self, name: str) -> Pipeline:
        name = name or self.default
        if name not in self.pipelines:
            known = ", ".join(self.pipelines)
            raise PipelineNotFound(f"no pipeline {name!r} is served here, only {known}")
        return self.pipelines[name]

    # ------------------------------------------------------------ input that streams

    def attach(self, request_id: str, tenant: str = "") -> tuple[Run, Feeder]:
        """The tenant's running request and its one feeder, to be used as a context manager.

        Raises RequestNotFound, NotResumable, or FeederActive while there is another.
        """
        run = self.orchestrator.find(request_id, tenant)
        if run.lane is None:
            raise NotResumable(f"request {request_id!r} was not opened as resumable")
        return run, run.lane.attach()

    async def feed(self, run: Run, feeder: Feeder, updates: AsyncIterator[UpdateChunk]) -> Summary:
        """Adds all chunks, then ends the input. Raises what refuses a chunk, or the request's own
        error if it ends meanwhile; if it finishes, that is the summary's end too."""
        assert run.lane is not None
        lane = run.lane
        work = feeder.drive(_resolved(updates, run, lane))
        driving = owned_task(work, run.request_id, "feeding")
        ending = owned_task(run.ended(), run.request_id, "waiting for the end")
        try:
            await asyncio.wait((driving, ending), return_when=asyncio.FIRST_COMPLETED)
            # The request's own end comes first: a chunk that was under way then was not refused.
            if not (run.closed or run.completed):
                return driving.result()
            if run.error is not None:
                raise run.error
            feeder.summary.segments = lane.segments
            return feeder.summary
        finally:
            driving.cancel()
            ending.cancel()
            await asyncio.gather(driving, ending, return_exceptions=True)

    async def abort(self, request_ids: list[str], tenant: str = "") -> list[AbortOutcome]:
        """Aborts a tenant's requests; returns when their stages are free, one outcome per id."""
        return await self.orchestrator.abort(request_ids, ABORT_TIMEOUT_S, tenant)

    # ------------------------------------------------------------ the whole

    @property
    def pools(self) -> list[StagePool]:
        """Every pool once."""
        return list(self._users)

    def load(self) -> list[StageStatistics]:
        """The present load; a shared stage once."""
        return [
            StageStatistics(users, pool.config.name, pool.statistics(), pool.places.waiting)
            for pool, users in self._users.items()
        ]

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets the running ones finish for `timeout_s`, then ends the
        rest."""
        self.draining = True
        self.orchestrator.notify(GoingAway(timeout_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.orchestrator.idle()
        self.orchestrator.close_all(Draining("the server stopped", retry_after_s=DRAIN_RETRY_S))


def _users(pipelines: Iterable[Pipeline]) -> dict[StagePool, tuple[str, ...]]:
    """The names of the pipelines that use each pool."""
    users: dict[StagePool, tuple[str, ...]] = {}
    for pipeline in pipelines:
        for node in pipeline.stages.values():
            users[node.pool] = (*users.get(node.pool, ()), pipeline.name)
    return users


def _share(plan: Plan) -> Share:
    request = plan.request
    answers = (plan.params[node.name] for node in plan.needed)
    return Share(
        request.options.tenant, media_bytes(request.prompt), tokens(request.prompt, answers)
    )


async def _resolved(
    updates: AsyncIterator[UpdateChunk], run: Run, lane: Lane
) -> AsyncIterator[Chunk]:
    async for update in updates:
        yield resolve_chunk(update, run.plan, lane)


def _named(request: Request) -> Request:
    return replace(request, request_id=f"req-{secrets.token_hex(16)}")
