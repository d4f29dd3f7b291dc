"""What a server may ask of its clients: TLS, client certificates, a token."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import grpc


class InsecureTokenError(ValueError):
    """A token would travel to another machine in plain text."""


def tls_credentials(
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
) -> grpc.ChannelCredentials:
    """Credentials for TLS, from PEM files: `ca` the roots that the server's certificate may have
    (None: those that gRPC brings), `cert` and `key` our own, for mTLS.

    Raises OSError for a file that cannot be read, ValueError for a cert without its key."""
    if (cert is None) != (key is None):
        raise ValueError("a client certificate and its key go together")
    return grpc.ssl_channel_credentials(_read(ca), _read(key), _read(cert))


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def authorization(
    token: str | None, target: str, *, protected: bool
) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the token. Raises InsecureTokenError if nothing protects it on its way,
    and ValueError if it is none that metadata can carry."""
    if not token:
        return ()
    if not (token.isascii() and token.isprintable()):
        raise ValueError("a token is printable ASCII")
    if not protected and not _is_local(target):
        raise InsecureTokenError(f"the token would travel to {target} in plain text")
    return (("authorization", f"Bearer {token}"),)


def _is_local(target: str) -> bool:
    """Whether what is sent there stays on this machine, for all that the name says."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
