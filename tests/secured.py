"""Secured servers for tests: tokens and certificates in files, and clients with or without."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omni_grpc.server import Server
from omni_grpc.tokens import make_token
from tests.certificates import Authority, Pair


class TokenFile:
    """A file of tokens that a test changes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.yaml"
        self._entries: dict[str, dict[str, Any]] = {}
        self._write()

    def add(
        self,
        name: str,
        *rights: str,
        tenant: str = "acme",
        expires_in: timedelta | None = None,
    ) -> str:
        """A new token of this name."""
        token, digest = make_token()
        entry = {"name": name, "sha256": digest, "tenant": tenant, "rights": rights}
        if expires_in is not None:
            entry["expires"] = (datetime.now(UTC) + expires_in).isoformat()
        self._entries[name] = entry
        self._write()
        return token

    def revoke(self, name: str) -> None:
        """Removes a token."""
        del self._entries[name]
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps({"tokens": list(self._entries.values())}))  # JSON is YAML

    @property
    def settings(self) -> dict[str, str]:
        """For ServerConfig.auth."""
        return {"tokens": str(self.path)}


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata with the token."""
    return (("authorization", f"Bearer {token}"),)


def secure_channel(
    server: Server, roots: Authority | None, own: Pair | None = None, port: int | None = None
) -> grpc.aio.Channel:
    """A channel with a connection of its own. `roots` None: plain text."""
    target = f"127.0.0.1:{port or server.port}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    if roots is None:
        return grpc.aio.insecure_channel(target, options=options)
    key, cert = (None, None) if own is None else (own.key, own.cert)
    credentials = grpc.ssl_channel_credentials(roots.pem, key, cert)
    return grpc.aio.secure_channel(target, credentials, options=options)


async def listing(channel: grpc.aio.Channel, metadata: Any = ()) -> str:
    """How a call of reflection ends."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    try:
        answers = [
            one async for one in stub.ServerReflectionInfo(iter([request]), metadata=metadata)
        ]
    except grpc.aio.AioRpcError as error:
        return error.code().name
    assert answers[0].list_services_response.service
    return "OK"
