"""Owner of all Runs: opens them, finds them, ends them. One run per request id at a time.

Where callers prove their tenant, an id is that tenant's own: others neither meet it nor learn of
it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from omni_grpc.artifacts import Artifacts
from omni_grpc.errors import AbortedByClient, DuplicateRequest, OmniError, RequestNotFound
from omni_grpc.metrics import Metrics
from omni_grpc.outbox import Outbox
from omni_grpc.plan import Plan
from omni_grpc.run import Run
from omni_grpc.types import Notice

REMEMBERED = 10_000
"""Ended requests that `abort` still knows."""


class AbortOutcome(Enum):
    """What aborting an id did."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


Key = tuple[str, str]
"""Tenant and request id."""


class Orchestrator:
    """All requests of the server. `by_tenant`: a tenant's ids are its own; else tenants count for
    nothing here."""

    def __init__(
        self,
        make_outbox: Callable[[], Outbox],
        artifact_root: Path,
        metrics: Metrics,
        *,
        by_tenant: bool = False,
    ) -> None:
        self._make_outbox = make_outbox
        self.artifact_root = artifact_root.resolve()
        """Where the directories of requests are."""
        self._metrics = metrics
        self._by_tenant = by_tenant
        self._runs: dict[Key, Run] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Requests that run or wait."""
        return len(self._runs)

    def open(self, plan: Plan, on_closed: Callable[[], None] = lambda: None) -> Run:
        """A run for the plan, registered before anything is submitted; `on_closed` is called when
        it ends, in whatever way. Raises DuplicateRequest."""
        request_id = plan.request.request_id
        key = self._key(request_id, plan.request.options.tenant)
        if key in self._runs:
            raise DuplicateRequest(f"request {request_id!r} is in flight")
        artifacts = Artifacts(self.artifact_root)

        def closed(_: Run) -> None:
            self._closed(key)
            on_closed()

        run = Run(plan, self._make_outbox(), artifacts, closed, self._metrics)
        self._runs[key] = run
        self._idle.clear()
        return run

    def _key(self, request_id: str, tenant: str) -> Key:
        return (tenant if self._by_tenant else "", request_id)

    @property
    def runs(self) -> list[Run]:
        """Those that run or wait. From any thread."""
        return list(self._runs.values())

    def find(self, request_id: str, tenant: str = "") -> Run:
        """The tenant's run with this id. Raises RequestNotFound."""
        run = self._runs.get(self._key(request_id, tenant))
        if run is None:
            raise RequestNotFound(f"no request {request_id!r} runs here")
        return run

    async def abort(
        self, request_ids: Iterable[str], timeout_s: float, tenant: str = ""
    ) -> list[AbortOutcome]:
        """Aborts a tenant's requests and waits until every stage has freed them, at most
        `timeout_s`."""
        outcomes, runs = [], []
        for request_id in request_ids:
            key = self._key(request_id, tenant)
            run = self._runs.get(key)
            if run is not None:
                run.close(AbortedByClient("the request was aborted"))
                runs.append(run)
                outcomes.append(AbortOutcome.ABORTED)
            elif key in self._ended:
                outcomes.append(AbortOutcome.ALREADY_FINISHED)
            else:
                outcomes.append(AbortOutcome.NOT_FOUND)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for run in runs:
                    await run.released()
        return outcomes

    def close_all(self, error: OmniError) -> None:
        """Ends every request with `error`."""
        for run in list(self._runs.values()):
            run.close(error)

    def notify(self, notice: Notice) -> None:
        """Tells every session."""
        for run in self._runs.values():
            run.delivery.notify(notice)

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    def statistics(self) -> list[dict[str, object]]:
        """What every run holds; empty when all is freed."""
        return [run.statistics() for run in self._runs.values()]

    def _closed(self, key: Key) -> None:
        # An id may have been taken again only after this: `open` refuses it while it is here.
        self._runs.pop(key, None)
        self._ended[key] = None
        self._ended.move_to_end(key)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if not self._runs:
            self._idle.set()
