"""The line before a stage: who waits for a place, and who is next.

Requests that run already come first: they hold places elsewhere, and turning them away would waste
what was done for them. New requests follow, each tenant in its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")


class Line(Generic[Waiter]):
    """Those that wait, each once. Adding, taking and leaving cost the same however many wait."""

    def __init__(self) -> None:
        self._running: OrderedDict[Waiter, None] = OrderedDict()
        self._tenants: OrderedDict[str, OrderedDict[Waiter, None]] = OrderedDict()
        self._tenant_of: dict[Waiter, str] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._tenant_of)

    def __iter__(self) -> Iterator[Waiter]:
        yield from self._running
        yield from self._tenant_of

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._running or waiter in self._tenant_of

    @property
    def new(self) -> int:
        """How many of them do not run yet."""
        return len(self._tenant_of)

    def add(self, waiter: Waiter, tenant: str, *, running: bool) -> None:
        """Puts one at the end of its part of the line."""
        if running:
            self._running[waiter] = None
            return
        self._tenant_of[waiter] = tenant
        self._tenants.setdefault(tenant, OrderedDict())[waiter] = None

    def first(self) -> Waiter | None:
        """The next one, who stays; None where nobody waits."""
        line = self._running or next(iter(self._tenants.values()), None)
        return next(iter(line)) if line else None

    def take(self) -> Waiter:
        """Takes the next one out. Its tenant's turn is over."""
        waiter = self.first()
        assert waiter is not None
        tenant = self._tenant_of.get(waiter)
        self.remove(waiter)
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """One leaves, from wherever it is. Does nothing for one that is not there."""
        self._running.pop(waiter, None)
        tenant = self._tenant_of.pop(waiter, None)
        if tenant is not None:
            line = self._tenants[tenant]
            del line[waiter]
            if not line:
                del self._tenants[tenant]
