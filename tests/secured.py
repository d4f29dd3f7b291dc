"""Secured servers for tests: tokens and certificates in files, and clients with or without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omni_grpc.server import Server
from omni_grpc.tokens import make_token
from omni_grpc.v1 import service_pb2
from tests.certificates import Authority, Pair
from tests.running import serving, text_pipeline
from tests.support import Served, freed, rich_error

INFO = service_pb2.GetServerInfoRequest()
DIGEST = "ab" * 32
ENTRY = f"{{name: a, sha256: {DIGEST}, tenant: t, rights: [infer]}}"
"""A token's entry in YAML."""


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


@dataclass(frozen=True)
class Guarded:
    """A server with tokens, and the file that it reads."""

    served: Served
    tokens: TokenFile


@pytest.fixture(scope="session")
async def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """One for all tests."""
    tokens = TokenFile(tmp_path_factory.mktemp("tokens"))
    tokens.add("first", "info")
    async with serving(text_pipeline("guarded"), auth=tokens.settings, admin_port=0) as running:
        yield Guarded(Served(running.server, running.omni, running.channel), tokens)


@pytest.fixture
async def guarded(guarded_server: Guarded) -> AsyncIterator[Served]:
    """`guarded_server`. When the test is over, it must hold nothing."""
    yield guarded_server.served
    await freed(guarded_server.served.server)


@pytest.fixture
def token_file(guarded_server: Guarded) -> TokenFile:
    """The tokens of `guarded_server`."""
    return guarded_server.tokens


async def failure(served: Served, method: str, metadata: Any, message: bytes = b"") -> Any:
    """How a call with one message fails; None where it doesn't. As a unary call, whatever the
    method is: grpcio's streams lose a status that comes while they write."""
    call: Any = served.channel.unary_unary(f"/omni_grpc.v1.OmniService/{method}")
    try:
        await call(message, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return rich_error(error)
    return None


async def known(
    served: Served, token: str, wanted: grpc.StatusCode | None = None, within: float = 5
) -> None:
    """Returns when the token is known to the server; or answered with `wanted`. The token needs
    the right `info`."""
    wanted = wanted or grpc.StatusCode.OK
    async with asyncio.timeout(within):
        while True:
            call = served.stub.GetServerInfo(INFO, metadata=bearer(token))
            if (await call.code()) is wanted:
                return
            await asyncio.sleep(0.02)


async def added(served: Served, tokens: TokenFile, name: str, *rights: str, **more: Any) -> str:
    """A new token, when the server knows it."""
    token = tokens.add(name, *rights, **more)
    async with asyncio.timeout(5):
        while True:
            call = served.stub.GetServerInfo(INFO, metadata=bearer(token))
            if (await call.code()) is not grpc.StatusCode.UNAUTHENTICATED:
                return token
            await asyncio.sleep(0.02)
