"""Who may connect, and how a connection is kept. Times in seconds."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from omni_grpc.config.base import Frozen, Seconds


class TlsConfig(Frozen):
    """TLS of all listeners but health's own. Paths of PEM files, read again when they change."""

    cert: str
    """The server's certificate, followed by the ones between it and its root."""
    key: str
    """The certificate's private key, not encrypted."""
    client_ca: str | None = None
    """If set, mTLS: only clients with a certificate that one of these roots has signed come in."""


class AuthConfig(Frozen):
    """Bearer tokens, for all listeners but health's own."""

    tokens: str
    """File of tokens' hashes (docs/security.md has its form), read again when it changes."""
    open_reflection: bool = True
    """Whether reflection needs no token. It tells the contract only, and that is public."""


class ConnectionPolicy(Frozen):
    """How long a connection lives, and what it may carry."""

    keepalive_time: Seconds = 60.0
    """After so much silence the server asks whether the client is still there."""
    keepalive_timeout: Seconds = 20.0
    """What does not answer that within this time is cut."""
    min_ping_interval: Seconds = 10.0
    """A client that pings more often, over and over, is cut."""
    max_age: Seconds | None = None
    """A connection of this age, give or take a tenth, takes no new calls: clients connect anew, and
    a balancer can spread them again. Calls that run go on to their end. None: no limit."""
    max_idle: Seconds | None = None
    """A connection without a call for so long is closed. None: no limit."""
    max_concurrent_streams: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Calls at once on one connection; more wait in the client, where nobody sees them. None: no
    limit, and what is over `max_requests` is refused at once."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there. A name other than localhost may mean
    any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
