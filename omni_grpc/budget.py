"""What the server and each tenant may have under way: requests, tokens and bytes of media.

A refusal says when to come back, from how fast requests have been ending; one that would be over a
budget by itself is told that coming back does not help."""

from __future__ import annotations

from dataclasses import dataclass

from omni_grpc.config import ServerConfig
from omni_grpc.errors import MediaBudget, OmniError, QueueFull, TenantBudget
from omni_grpc.turns import Turns


@dataclass(frozen=True, slots=True)
class Share:
    """What one request holds of the budgets."""

    tenant: str
    media_bytes: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of one account; `tokens` None: any number."""

    requests: int
    media_bytes: int
    tokens: int | None


class Account:
    """What is under way of one tenant, or of the whole server. `full` is what it raises."""

    def __init__(self, whose: str, limits: Limits, full: type[OmniError]) -> None:
        self.requests = 0
        self.media_bytes = 0
        self.tokens = 0
        self._whose = whose
        self._limits = limits
        self._full = full
        self._turns = Turns()

    def check_count(self, share: Share) -> None:
        """Raises `full` where there is no room for the request, or for its tokens."""
        limits = self._limits
        if self.requests >= limits.requests:
            raise self._refusal(f"{self._whose} holds {self.requests} requests, its most")
        if limits.tokens is None or self.tokens + share.tokens <= limits.tokens:
            return
        if share.tokens > limits.tokens:
            text = f"the request may need {share.tokens} tokens, {self._whose} {limits.tokens}"
            raise self._full(f"{text} at most")
        raise self._refusal(f"{self._whose} holds {self.tokens} tokens, and {share.tokens} more")

    def check_media(self, share: Share) -> None:
        """Raises MediaBudget where there is no room for the request's media."""
        most = self._limits.media_bytes
        if not share.media_bytes or self.media_bytes + share.media_bytes <= most:
            return
        retry = self._turns.next_s() if share.media_bytes <= most else None
        raise MediaBudget("too many bytes of media are under way", retry_after_s=retry)

    def _refusal(self, text: str) -> OmniError:
        return self._full(text, retry_after_s=self._turns.next_s())

    def take(self, share: Share) -> None:
        """Counts a request that begins."""
        self._count(share, 1)
        self._turns.began()

    def give(self, share: Share) -> None:
        """Counts a request that has ended."""
        self._count(share, -1)
        self._turns.ended()

    def _count(self, share: Share, sign: int) -> None:
        self.requests += sign
        self.media_bytes += sign * share.media_bytes
        self.tokens += sign * share.tokens


class Budget:
    """Counts what is under way. `take` and `give` are synchronous: nothing can come in between."""

    def __init__(self, settings: ServerConfig) -> None:
        whole = Limits(
            settings.max_requests, settings.max_media_bytes, settings.max_tokens_in_flight
        )
        self._whole = Account("the server", whole, QueueFull)
        self._tenant_limits = Limits(
            settings.max_tenant_requests,
            settings.max_tenant_media_bytes,
            settings.max_tenant_tokens,
        )
        self._tenants: dict[str, Account] = {}

    def take(self, share: Share) -> None:
        """Takes a request's share. Raises QueueFull, TenantBudget or MediaBudget, and takes
        nothing."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            tenant = Account("the tenant", self._tenant_limits, TenantBudget)
        accounts = (self._whole, tenant)
        for account in accounts:
            account.check_count(share)
        for account in accounts:
            account.check_media(share)
        for account in accounts:
            account.take(share)
        self._tenants[share.tenant] = tenant

    def give(self, share: Share) -> None:
        """A request has ended: its share is free."""
        tenant = self._tenants[share.tenant]
        for account in (self._whole, tenant):
            account.give(share)
        if not tenant.requests:
            # A tenant that is gone leaves nothing behind.
            del self._tenants[share.tenant]

    def statistics(self) -> dict[str, int]:
        """What is under way; all zero when all is freed."""
        return {
            "requests": self._whole.requests,
            "tokens": self._whole.tokens,
            "media_bytes": self._whole.media_bytes,
            "tenants": len(self._tenants),
        }
