"""The client and the commands at a server that asks who they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_grpc_client import (
    InsecureTokenError,
    NotFoundError,
    OmniClient,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    tls_credentials,
)
from tests.certificates import Authority
from tests.running import BIN, serving, text_pipeline
from tests.secured import TokenFile
from tests.support import freed


@dataclass(frozen=True)
class Fort:
    """A server with mutual TLS and tokens, and what opens it."""

    target: str
    folder: Path
    token: str
    reader: str

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """Roots, our certificate, its key."""
        return self.folder / "ca.crt", self.folder / "client.crt", self.folder / "client.key"

    def client(self, token: str | None) -> OmniClient:
        """A client with a certificate, and that token."""
        return OmniClient(self.target, credentials=tls_credentials(*self.files), token=token)


@pytest.fixture(scope="module")
async def fort(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fort]:
    """The server. In the end it must hold nothing."""
    folder = tmp_path_factory.mktemp("fort")
    servers, clients = Authority("servers"), Authority("clients")
    cert, key = servers.issue().write(folder)
    clients.issue("client").write(folder, "client")
    (folder / "ca.crt").write_bytes(servers.pem)
    (folder / "clients.crt").write_bytes(clients.pem)
    tokens = TokenFile(folder)
    token, reader = tokens.add("all", "infer", "info"), tokens.add("reader", "info")
    tls = {"cert": str(cert), "key": str(key), "client_ca": str(folder / "clients.crt")}
    async with serving(text_pipeline("fort"), tls=tls, auth=tokens.settings) as running:
        yield Fort(f"localhost:{running.server.port}", folder, token, reader)
        await freed(running.server)


async def test_every_kind_of_call_carries_the_token(fort: Fort) -> None:
    async with fort.client(fort.token) as client:
        assert (await client.server_info()).default_pipeline == "fort"
        assert await client.load()
        assert (await client.generate("over the wall", request_id="r")).text == "over the wall"
        assert await client.abort("r")
        async with client.open() as request:
            await request.send("fed")
            await request.finish()
            assert [event async for event in request]
        async with client.interact("in session") as session:
            assert [item async for item in session]
        with pytest.raises(NotFoundError, match="no request"):
            async with client.attach("nobody"):
                pass


async def test_refusals_are_errors_of_their_own(fort: Fort) -> None:
    async with fort.client(fort.reader) as client:
        assert await client.server_info()
        with pytest.raises(PermissionDeniedError, match="'infer'"):
            await client.generate("x")
    for token in (None, "omni_wrong"):
        async with fort.client(token) as client:
            with pytest.raises(UnauthenticatedError):
                await client.server_info()
    ca = fort.files[0]
    async with OmniClient(fort.target, credentials=tls_credentials(ca), token=fort.token) as client:
        with pytest.raises(UnavailableError):
            await client.server_info(timeout=5)


@pytest.mark.parametrize("target", ["example.org:1", "10.0.0.1:1", "dns:///example.org:1"])
def test_a_token_does_not_leave_the_machine_in_plain_text(target: str) -> None:
    with pytest.raises(InsecureTokenError, match="plain text"):
        OmniClient(target, token="omni_x")
    assert OmniClient(target, token="omni_x", insecure_token=True)
    assert OmniClient(target, token="omni_x", credentials=tls_credentials())
    for local in ("localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/x", "dns:///localhost:1"):
        assert OmniClient(local, token="omni_x")


def test_credentials_that_cannot_be(fort: Fort) -> None:
    ca, cert, _ = fort.files
    with pytest.raises(ValueError, match="go together"):
        tls_credentials(ca, cert)
    with pytest.raises(FileNotFoundError):
        tls_credentials("no-such-file")
    with pytest.raises(ValueError, match="printable ASCII"):
        OmniClient(token="two\nlines")


# ---------------------------------------------------------------- commands


async def omni(*arguments: object, token: str = "") -> tuple[int | None, str, str]:
    """Runs a command; its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        BIN / "omni-grpc",
        *(str(argument) for argument in arguments),
        env={**os.environ, "COLUMNS": "200", "OMNI_GRPC_TOKEN": token},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, out.decode(), err.decode()


async def test_commands_bring_certificates_and_a_token(fort: Fort) -> None:
    ca, cert, key = fort.files
    there: tuple[Any, ...] = ("--target", fort.target, "--tls-ca", ca)
    whole = (*there, "--tls-cert", cert, "--tls-key", key)
    code, out, err = await omni("generate", "hello", *whole, token=fort.token)
    assert (code, out) == (0, "hello\n"), err
    assert (await omni("describe", *whole, "--token", fort.token))[0] == 0
    code, out, err = await omni("describe", *whole)
    assert code == 1 and "UNAUTHENTICATED: the call has no token" in err
    assert "give a token: --token, or the environment's OMNI_GRPC_TOKEN" in err
    code, out, err = await omni("describe", *there, token=fort.token)
    assert code == 4 and "UNAVAILABLE" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tls-ca", "no-such-file"), "no-such-file"),
        (("--tls-cert", "no-such-file"), "go together"),
        (("--target", "10.0.0.1:1", "--token", "omni_secret"), "would travel to 10.0.0.1:1"),
    ],
)
async def test_commands_that_cannot_be_safe_do_not_call(
    arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = await omni("describe", *arguments)
    assert code == 2 and message in err and "Traceback" not in err
    assert "omni_secret" not in out + err
