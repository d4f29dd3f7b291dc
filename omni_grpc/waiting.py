"""The places of a stage's replicas: who has one, who waits, and who is next.

Requests that run already come first: they hold places elsewhere, and turning them away would waste
what was done for them. New requests follow, each tenant in its turn, as many as may wait."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar

import msgspec

from omni_grpc.balance import estimate
from omni_grpc.config import StageConfig
from omni_grpc.errors import InternalError, OmniError, QueueFull
from omni_grpc.ipc import Abort, Task, ToReplica
from omni_grpc.task import TaskHandle, TaskSink
from omni_grpc.turns import Turns

log = logging.getLogger(__name__)

Group = Sequence[tuple[Task, TaskSink]]
Member = TypeVar("Member")
Replicas = TypeVar("Replicas", bound="Holder")


class Holder(Protocol):
    """A replica, as far as it takes tasks."""

    @property
    def running(self) -> int:
        """Tasks that it holds."""

    def submit(self, task: Task, handle: TaskHandle) -> None:
        """Takes a task."""

    def send(self, message: ToReplica) -> None:
        """Takes a message about one."""


class Waiter:
    """Tasks of one request that go to one replica together. Until then it keeps what they are
    sent; `leave` is called when one of them is aborted."""

    def __init__(self, group: Group, leave: Callable[[Waiter], None]) -> None:
        self._leave = leave
        self._since = asyncio.get_running_loop().time()
        self._tasks = [task for task, _ in group]
        self._kept: list[ToReplica] = []
        self.handles = [
            TaskHandle(
                task.id, task.request_id, self._keep, sink, estimate(task.params, task.prompt)
            )
            for task, sink in group
        ]

    def __len__(self) -> int:
        return len(self.handles)

    def _keep(self, message: ToReplica) -> None:
        if isinstance(message, Abort):
            self._leave(self)
        else:
            self._kept.append(message)

    def place(self, replica: Holder, placed: Callable[[], None]) -> None:
        """Sends everything to a replica, in one turn of the loop; `placed` is called for each task.
        Raises what it raises; nothing is left there then."""
        waited = asyncio.get_running_loop().time() - self._since
        try:
            for task, handle in zip(self._tasks, self.handles, strict=True):
                left = max(0.0, task.timeout_s - waited)
                replica.submit(msgspec.structs.replace(task, timeout_s=left), handle)
                placed()
        except BaseException:
            for handle in self.handles:
                if not handle.waits:
                    handle.abort()
            raise
        for message in self._kept:
            replica.send(message)
        self._kept.clear()

    def refuse(self, error: OmniError) -> None:
        """Those that no replica has will not be taken."""
        for handle in self.handles:
            if handle.waits:
                handle.sink.on_refused(error)

    def withdraw(self) -> None:
        """They were aborted: nothing of them is left."""
        self._kept.clear()
        for handle in self.handles:
            handle.sink.on_ended(None)


class Line(Generic[Member]):
    """Those that wait, each once. Adding, taking and leaving cost the same however many wait."""

    def __init__(self) -> None:
        self._running: OrderedDict[Member, None] = OrderedDict()
        self._tenants: OrderedDict[str, OrderedDict[Member, None]] = OrderedDict()
        self._tenant_of: dict[Member, str] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._tenant_of)

    def __iter__(self) -> Iterator[Member]:
        yield from self._running
        yield from self._tenant_of

    def __contains__(self, waiter: Member) -> bool:
        return waiter in self._running or waiter in self._tenant_of

    @property
    def new(self) -> int:
        """How many of them do not run yet."""
        return len(self._tenant_of)

    @property
    def running(self) -> int:
        """How many of them run already."""
        return len(self._running)

    def add(self, waiter: Member, tenant: str, *, running: bool) -> None:
        """Puts one at the end of its part of the line."""
        if running:
            self._running[waiter] = None
            return
        self._tenant_of[waiter] = tenant
        self._tenants.setdefault(tenant, OrderedDict())[waiter] = None

    def first(self) -> Member | None:
        """The next one, who stays; None where nobody waits."""
        lines = chain((self._running,), self._tenants.values())
        return next(chain.from_iterable(lines), None)

    def take(self) -> Member:
        """Takes the next one out. Its tenant's turn is over."""
        waiter = self.first()
        assert waiter is not None
        tenant = self._tenant_of.get(waiter)
        self.remove(waiter)
        if tenant is not None and tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return waiter

    def remove(self, waiter: Member) -> None:
        """One leaves, from wherever it is. Does nothing for one that is not there."""
        self._running.pop(waiter, None)
        tenant = self._tenant_of.pop(waiter, None)
        if tenant is not None:
            line = self._tenants[tenant]
            del line[waiter]
            if not line:
                del self._tenants[tenant]


class Places(Generic[Replicas]):
    """One stage's places and the line before them. `serving` gives the replicas that may take
    tasks, and raises StageUnavailable where there is none; `pick` is the policy that balances;
    `changed` hears when a request begins to wait, or leaves."""

    def __init__(
        self,
        config: StageConfig,
        serving: Callable[[], list[Replicas]],
        pick: Callable[[Sequence[Replicas]], Replicas],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._serving = serving
        self._pick = pick
        self._changed = changed
        self._line: Line[Waiter] = Line()
        self._turns = Turns()

    @property
    def tasks(self) -> list[TaskHandle]:
        """The tasks that wait, in no order."""
        return [handle for waiter in self._line for handle in waiter.handles]

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._line)

    def submit(self, group: Group, tenant: str, *, running: bool) -> list[TaskHandle]:
        """Sends the tasks to one replica, or lets them wait. Raises StageUnavailable where none
        serves, and QueueFull where a request that is not `running` would be one too many."""
        waiter = Waiter(group, self._left)
        free = self._free(len(waiter))
        if free and not (self._line.running if running else len(self._line)):
            waiter.place(self._pick(free), self._turns.began)
        elif running or self._line.new < self._config.max_waiting:
            self._line.add(waiter, tenant, running=running)
            self._changed()
        else:
            raise self._full()
        return waiter.handles

    def check_room(self) -> None:
        """Raises what `submit` would of a new request with one task."""
        free = self._free(1) and not len(self._line)
        if not free and self._line.new >= self._config.max_waiting:
            raise self._full()

    def _free(self, size: int) -> list[Replicas]:
        """The replicas with room for so many tasks. A group that is larger than a replica may hold
        has one for itself."""
        serving, most = self._serving(), self._config.max_tasks
        if most is None:
            return serving
        return [one for one in serving if not one.running or one.running + size <= most]

    def _full(self) -> QueueFull:
        name, most = self._config.name, self._config.max_tasks
        text = f"the replicas of stage {name!r} hold {most} tasks each, their most"
        if self._config.max_waiting:
            text += f", and {self._line.new} requests wait"
        return QueueFull(text, retry_after_s=self._turns.next_s())

    def freed(self) -> None:
        """A replica has let go of a task."""
        self._turns.ended()
        self.fill()

    def fill(self) -> None:
        """Those who wait take the places that are free."""
        while (waiter := self._line.first()) is not None:
            try:
                free = self._free(len(waiter))
            except OmniError:
                return
            if not free:
                return
            self._line.take()
            try:
                waiter.place(self._pick(free), self._turns.began)
            except Exception:
                log.exception("stage %s: a task that waited", self._config.name)
                waiter.refuse(InternalError("internal error"))

    def clear(self, error: OmniError) -> None:
        """No replica serves: nobody who waits will be taken."""
        waiters = list(self._line)
        self._line = Line()
        for waiter in waiters:
            waiter.refuse(error)

    def _left(self, waiter: Waiter) -> None:
        if waiter in self._line:
            self._line.remove(waiter)
            waiter.withdraw()
            self._changed()
            # It may have been the first of the line, and too large for the room that there is.
            self.fill()
