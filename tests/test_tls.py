"""TLS: who comes in with which certificate, and certificates that are replaced meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from omni_grpc.server import Server
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2
from omni_grpc.watched import REFRESH_S
from tests.certificates import Authority, Pair
from tests.conftest import Serve
from tests.running import health_stub, text_pipeline
from tests.secured import TokenFile, bearer, listing, secure_channel
from tests.support import Served, collect, eventually, script, stub_of, texts

INFO = service_pb2.GetServerInfoRequest()


@dataclass(frozen=True)
class Files:
    """What a server's certificates are in."""

    folder: Path
    authority: Authority

    def settings(self, *, client_ca: Authority | None = None) -> dict[str, str]:
        """For ServerConfig.tls."""
        settings = {"cert": str(self.folder / "tls.crt"), "key": str(self.folder / "tls.key")}
        if client_ca is not None:
            ca = self.folder / "clients.crt"
            ca.write_bytes(client_ca.pem)
            settings["client_ca"] = str(ca)
        return settings


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A good certificate."""
    authority = Authority()
    authority.issue().write(tmp_path)
    return Files(tmp_path, authority)


async def outcome(channel: grpc.aio.Channel, metadata: Any = ()) -> str:
    """What a call on the channel ends with. The channel is closed."""
    async with channel:
        try:
            await stub_of(channel).GetServerInfo(INFO, timeout=5, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


# ---------------------------------------------------------------- who comes in


TOKENS = {
    "none": "UNAUTHENTICATED",
    "wrong": "UNAUTHENTICATED",
    "expired": "UNAUTHENTICATED",
    "lacking the right": "PERMISSION_DENIED",
    "right": "OK",
}
SHUT = dict.fromkeys(TOKENS, "UNAVAILABLE")


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[TokenFile, dict[str, Any]]:
    """A file of tokens, and metadata of every kind."""
    file = TokenFile(tmp_path)
    return file, {
        "none": (),
        "wrong": bearer("omni_wrong"),
        "expired": bearer(file.add("old", "info", expires_in=timedelta(seconds=-1))),
        "lacking the right": bearer(file.add("other", "infer", "admin")),
        "right": bearer(file.add("right", "info", expires_in=timedelta(hours=1))),
    }


async def outcomes(
    tokens: dict[str, Any], server: Server, roots: Authority | None, own: Pair | None = None
) -> dict[str, str]:
    """What a call with each token ends with, on connections of their own."""
    results = await asyncio.gather(
        *(outcome(secure_channel(server, roots, own), metadata) for metadata in tokens.values())
    )
    return dict(zip(tokens, results, strict=True))


async def test_certificates_and_tokens_let_in_who_has_both(
    serve: Serve, files: Files, tokens: tuple[TokenFile, dict[str, Any]]
) -> None:
    file, metadata = tokens
    served = await open_server(serve, tls=files.settings(), auth=file.settings)
    roots = {"none": None, "wrong CA": Authority(), "right": files.authority}
    for name, root in roots.items():
        found = await outcomes(metadata, served.server, root)
        assert found == (TOKENS if name == "right" else SHUT), name


async def test_a_client_refuses_an_expired_server(
    serve: Serve, files: Files, tokens: tuple[TokenFile, dict[str, Any]]
) -> None:
    file, metadata = tokens
    files.authority.issue(expired=True).write(files.folder)
    served = await open_server(serve, tls=files.settings(), auth=file.settings)
    found = await outcomes(metadata, served.server, files.authority)
    assert found == SHUT


async def test_mutual_tls_lets_in_who_has_both(
    serve: Serve, files: Files, tokens: tuple[TokenFile, dict[str, Any]]
) -> None:
    file, metadata = tokens
    clients = Authority("clients")
    served = await open_server(serve, tls=files.settings(client_ca=clients), auth=file.settings)
    pairs = {
        "none": None,
        "wrong CA": Authority("clients").issue("client"),
        "the server's CA": files.authority.issue("client"),
        "expired": clients.issue("client", expired=True),
        "right": clients.issue("client"),
    }
    for name, pair in pairs.items():
        found = await outcomes(metadata, served.server, files.authority, pair)
        assert found == (TOKENS if name == "right" else SHUT), name


async def test_mutual_tls_without_tokens(serve: Serve, files: Files) -> None:
    clients = Authority("clients")
    served = await open_server(serve, tls=files.settings(client_ca=clients))
    good = secure_channel(served.server, files.authority, clients.issue("client"))
    assert await outcome(good) == "OK"
    assert await outcome(secure_channel(served.server, files.authority)) == "UNAVAILABLE"


async def open_server(serve: Serve, **settings: Any) -> Served:
    """A server with these settings."""
    return await serve(text_pipeline("secured"), **settings)


# ---------------------------------------------------------------- certificates that change


async def shown(port: int, roots: Authority) -> bytes:
    """The certificate that a new connection is shown."""

    def connect() -> bytes:
        context = ssl.create_default_context(cadata=roots.pem.decode())
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wrapped,
        ):
            return wrapped.getpeercert(binary_form=True) or b""

    return await asyncio.to_thread(connect)


async def until(condition: Callable[[], Awaitable[bool]], within: float) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(within):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


async def shows(port: int, roots: Authority, pair: Pair, within: float = 5) -> None:  # goal: 1 s
    """Returns when new connections are shown this pair's certificate."""
    wanted = ssl.PEM_cert_to_DER_cert(pair.cert.decode())

    async def new() -> bool:
        return await shown(port, roots) == wanted

    await until(new, within)


async def test_a_certificate_that_is_replaced_under_load_fails_no_call(
    serve: Serve, files: Files
) -> None:
    served = await open_server(serve, tls=files.settings())
    stopping, calls = asyncio.Event(), 0

    async def one_after_another(*, anew: bool) -> None:
        nonlocal calls
        channel = secure_channel(served.server, files.authority)
        try:
            while not stopping.is_set():
                if anew:
                    await channel.close()
                    channel = secure_channel(served.server, files.authority)
                assert texts(await collect(stub_of(channel), text="all is well")) == "all is well"
                calls += 1
        finally:
            await channel.close()

    async with secure_channel(served.server, files.authority) as channel:
        slow = [script(outputs=400, interval_ms=10)]
        long = asyncio.create_task(collect(stub_of(channel), stage_params=slow))
        async with asyncio.TaskGroup() as group:
            for anew in (True, True, False, False):
                group.create_task(one_after_another(anew=anew))
            for _ in range(3):
                pair = files.authority.issue()
                pair.write(files.folder)
                await shows(served.server.port, files.authority, pair)
            stopping.set()
        assert (await long)[-1].HasField("finished"), "what runs keeps its connection"
    assert calls > 20


async def test_the_swap_of_a_link_is_seen(serve: Serve, tmp_path: Path) -> None:
    """As Kubernetes updates a Secret's volume: tls.crt -> ..data/tls.crt, ..data -> a folder."""
    authority = Authority()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    authority.issue().write(tmp_path / "one")
    second = authority.issue()
    second.write(tmp_path / "two")
    (tmp_path / "..data").symlink_to("one")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    served = await open_server(serve, tls=Files(tmp_path, authority).settings())
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "..data")
    await shows(served.server.port, authority, second)


async def test_files_that_do_not_fit_leave_the_old_certificate_and_are_told_once(
    serve: Serve, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omni_grpc.watched")
    served = await open_server(serve, tls=files.settings())
    port = served.server.port
    before = await shown(port, files.authority)
    new = files.authority.issue()
    (files.folder / "tls.crt").write_bytes(new.cert)  # and not its key
    await eventually(lambda: "cannot be used" in caplog.text, 5)
    (files.folder / "tls.key").write_bytes(new.key[: len(new.key) // 2])
    await eventually(lambda: caplog.text.count("cannot be used") == 2, 5)
    await asyncio.sleep(3 * REFRESH_S)
    assert caplog.text.count("cannot be used") == 2, "once for each change"
    assert await shown(port, files.authority) == before
    (files.folder / "tls.key").write_bytes(new.key)
    await shows(port, files.authority, new)
    assert "BEGIN" not in caplog.text


async def test_clients_of_a_new_authority_come_in_and_those_of_the_old_do_not(
    serve: Serve, files: Files
) -> None:
    old, new = Authority("clients"), Authority("clients")
    served = await open_server(serve, tls=files.settings(client_ca=old))

    async def enters(authority: Authority) -> bool:
        pair = authority.issue("client")
        return await outcome(secure_channel(served.server, files.authority, pair)) == "OK"

    assert await enters(old) and not await enters(new)
    (files.folder / "clients.crt").write_bytes(new.pem)
    await until(lambda: enters(new), 5)  # the goal is 1 s
    assert not await enters(old)


# ---------------------------------------------------------------- the other listeners


async def test_admin_has_the_same_tls_and_health_alone_has_none(
    serve: Serve, files: Files, tokens: tuple[TokenFile, dict[str, Any]]
) -> None:
    file, metadata = tokens
    served = await open_server(
        serve, tls=files.settings(), auth=file.settings, admin_port=0, health_port=0
    )
    server = served.server
    drain = admin_pb2.PauseStageRequest(target={"stage": "text"})
    for token, code in (("right", "PERMISSION_DENIED"), ("lacking the right", "OK")):
        async with secure_channel(server, files.authority, port=server.admin_port) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            call = stub.PauseStage(drain, metadata=metadata[token])
            assert (await call.code()).name == code
    async with secure_channel(server, None, port=server.health_port) as channel:
        for name in ("", "omni-readiness", "omni-startup", "omni-liveness", "stage/text"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert await health_stub(channel).Check(request, timeout=5)
        call = stub_of(channel).GetServerInfo(INFO, metadata=metadata["right"])
        assert (await call.code()) is grpc.StatusCode.UNIMPLEMENTED
        assert await listing(channel) == "UNIMPLEMENTED"
