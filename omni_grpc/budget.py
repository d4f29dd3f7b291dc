"""What the server and each tenant may have under way: requests and bytes of media.

A refusal says when to come back, from how fast requests have been ending.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass

from omni_grpc.config import ServerConfig
from omni_grpc.errors import MediaBudget, QueueFull, TenantBudget

RATE_WINDOW_S = 10.0
MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
UNKNOWN_RETRY_S = 1.0
"""When to come back while nothing has ended yet."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one request holds of the budgets."""

    tenant: str
    media_bytes: int


class Budget:
    """Counts what is under way. `take` and `give` are synchronous: nothing can come in between."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._requests = 0
        self._media_bytes = 0
        self._tenant_requests: defaultdict[str, int] = defaultdict(int)
        self._tenant_bytes: defaultdict[str, int] = defaultdict(int)
        self._ended: deque[float] = deque()

    def take(self, share: Share) -> None:
        """Takes a request's share. Raises QueueFull, TenantBudget or MediaBudget, and takes
        nothing."""
        settings, tenant = self._settings, share.tenant
        if self._requests >= settings.max_requests:
            raise QueueFull(
                f"the server holds {self._requests} requests, its most",
                retry_after_s=self.retry_s(),
            )
        if self._tenant_requests[tenant] >= settings.max_tenant_requests:
            raise TenantBudget(
                f"the tenant holds {self._tenant_requests[tenant]} requests, its most",
                retry_after_s=self.retry_s(),
            )
        over = (
            self._media_bytes + share.media_bytes > settings.max_media_bytes
            or self._tenant_bytes[tenant] + share.media_bytes > settings.max_tenant_media_bytes
        )
        if share.media_bytes and over:
            raise MediaBudget("too many bytes of media are under way", retry_after_s=self.retry_s())
        self._count(share, 1)

    def give(self, share: Share) -> None:
        """A request has ended: its share is free."""
        self._count(share, -1)
        self._ended.append(asyncio.get_running_loop().time())
        self._forget()

    def _count(self, share: Share, sign: int) -> None:
        self._requests += sign
        self._media_bytes += sign * share.media_bytes
        self._tenant_requests[share.tenant] += sign
        self._tenant_bytes[share.tenant] += sign * share.media_bytes
        if not self._tenant_requests[share.tenant]:
            # A tenant that is gone leaves nothing behind.
            del self._tenant_requests[share.tenant], self._tenant_bytes[share.tenant]

    def _forget(self) -> None:
        horizon = asyncio.get_running_loop().time() - RATE_WINDOW_S
        while self._ended and self._ended[0] < horizon:
            self._ended.popleft()

    def retry_s(self) -> float:
        """When a place is likely to be free: the time in which one request ends, lately."""
        self._forget()
        if not self._ended:
            return UNKNOWN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, RATE_WINDOW_S / len(self._ended)))

    def statistics(self) -> dict[str, int]:
        """What is under way; all zero when all is freed."""
        return {
            "requests": self._requests,
            "media_bytes": self._media_bytes,
            "tenants": sum(1 for count in self._tenant_requests.values() if count),
        }
