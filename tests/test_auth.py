"""Bearer tokens: who may call what, and a file of tokens that changes."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2

from omni_grpc import auth
from omni_grpc.tokens import Right
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2
from tests.conftest import Serve
from tests.running import health_stub, rest_of, text_pipeline
from tests.secured import INFO, TokenFile, added, bearer, failure, known, listing
from tests.support import Served, ask, eventually, rich_error, script

RESUME = admin_pb2.ResumeStageRequest(target={"stage": "text"})


async def test_every_method_that_is_served_is_in_the_table() -> None:
    pool = descriptor_pool.Default()
    names = ["omni_grpc.v1.OmniService", "omni_grpc.v1.AdminService", "grpc.channelz.v1.Channelz"]
    names += ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    served = {
        f"/{service}/{method.name}"
        for service in names
        for method in pool.FindServiceByName(service).methods
    }
    assert served <= set(auth.RIGHTS) | set(auth.OPEN)
    assert not set(auth.RIGHTS) & set(auth.OPEN)


# ---------------------------------------------------------------- tokens


METHODS = {
    "AddRequest": "infer",
    "StreamingUpdate": "infer",
    "SubmitInteraction": "infer",
    "Abort": "infer",
    "GetServerInfo": "info",
    "GetLoad": "info",
    "WatchLoad": "info",
}
"""The right that a method needs, as users know it."""

REFUSED: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "another scheme": (("authorization", "Basic omni_x"),),
    "empty": (("authorization", "Bearer "),),
    "no scheme": (("authorization", "omni_x"),),
    "unknown": bearer("omni_x"),
    "very long": bearer("x" * 6000),
    "two": bearer("omni_x") + bearer("omni_y"),
    "under another name": (("x-authorization", "Bearer omni_x"),),
}


async def test_a_call_without_a_good_token_is_refused(guarded: Served) -> None:
    for metadata in REFUSED.values():
        for method in METHODS:
            error = await failure(guarded, method, metadata)
            assert error.code is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
            assert (error.reason, error.domain) == ("UNAUTHENTICATED", "omni-grpc")
            assert error.trailers["omni-pod"] == guarded.server.pod
            assert "omni_" not in error.message


async def test_how_a_token_is_read(guarded: Served, token_file: TokenFile) -> None:
    token = await added(guarded, token_file, "good", "info")
    twice = bearer(token) + bearer(token)
    assert (await failure(guarded, "GetLoad", twice)).code is grpc.StatusCode.UNAUTHENTICATED
    for scheme in ("bearer", "BEARER"):
        metadata = (("authorization", f"{scheme} {token}"),)
        assert await guarded.stub.GetServerInfo(INFO, metadata=metadata)


async def test_a_large_request_is_refused_before_it_is_read(guarded: Served) -> None:
    big = ask("x" * (32 << 20))
    call = guarded.stub.AddRequest(big, timeout=10)
    assert (await call.code()) is grpc.StatusCode.UNAUTHENTICATED
    assert (await guarded.stub.GetServerInfo(INFO).code()) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_needs_its_right_and_no_other(
    guarded: Served, token_file: TokenFile
) -> None:
    rights = {right.value for right in Right}
    only = {right: bearer(token_file.add(right, right)) for right in rights}
    but = {right: bearer(token_file.add(f"not-{right}", *(rights - {right}))) for right in rights}
    await added(guarded, token_file, "last", "info")
    denied = grpc.StatusCode.PERMISSION_DENIED
    for method, right in METHODS.items():
        error = await failure(guarded, method, but[right])
        assert (error.code, error.reason) == (denied, "PERMISSION_DENIED"), method
        assert repr(right) in error.message
        error = await failure(guarded, method, only[right])
        assert error is None or error.code is not denied, method


async def test_an_operator_needs_the_right_on_the_admin_listener_too(
    guarded: Served, token_file: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omni_grpc.auth")
    user = bearer(await added(guarded, token_file, "user", "infer", "info"))
    operator = bearer(await added(guarded, token_file, "operator", "admin"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{guarded.server.admin_port}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        channelz: Any = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")
        for metadata, code in (
            ((), "UNAUTHENTICATED"),
            (user, "PERMISSION_DENIED"),
            (operator, "OK"),
        ):
            assert (await admin.ResumeStage(RESUME, metadata=metadata).code()).name == code
            call = channelz(b"", metadata=metadata)
            assert (await call.code()).name == code
            if code != "OK":
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert rich_error(caught.value).reason == code
    assert "/omni_grpc.v1.AdminService/ResumeStage by operator" in caplog.text
    assert "/grpc.channelz.v1.Channelz/GetServers PERMISSION_DENIED" in caplog.text


async def test_a_method_that_is_not_in_the_table_is_refused_to_everyone(
    guarded: Served, token_file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = bearer(await added(guarded, token_file, "all", "infer", "info", "admin"))
    monkeypatch.delitem(auth.RIGHTS, "/omni_grpc.v1.OmniService/GetLoad")
    assert await guarded.stub.GetServerInfo(INFO, metadata=everything)
    call = guarded.stub.GetLoad(service_pb2.GetLoadRequest(), metadata=everything)
    assert (await call.code()) is grpc.StatusCode.PERMISSION_DENIED
    assert (await failure(guarded, "Nothing", ())).code is grpc.StatusCode.UNAUTHENTICATED
    assert (await failure(guarded, "Nothing", everything)).code is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- what needs no token


async def test_health_needs_no_token(guarded: Served) -> None:
    health = health_stub(guarded.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="omni-readiness"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_reflection_needs_a_token_where_that_is_set(
    guarded: Served, serve: Serve, token_file: TokenFile
) -> None:
    assert await listing(guarded.channel) == "OK"
    closed = await serve(
        text_pipeline("closed"), auth={**token_file.settings, "open_reflection": False}
    )
    assert await listing(closed.channel) == "UNAUTHENTICATED"
    user, reader = token_file.add("user", "infer"), token_file.add("reader", "info")
    await known(closed, reader)
    assert await listing(closed.channel, bearer(user)) == "PERMISSION_DENIED"
    assert await listing(closed.channel, bearer(reader)) == "OK"


# ---------------------------------------------------------------- a file that changes


async def test_a_token_comes_and_goes_while_the_server_runs(
    guarded: Served, token_file: TokenFile
) -> None:
    token = token_file.add("guest", "info")
    started = time.monotonic()
    await known(guarded, token)
    assert time.monotonic() - started < 5  # the goal is 1 s
    token_file.revoke("guest")
    started = time.monotonic()
    await known(guarded, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    assert time.monotonic() - started < 5  # the goal is 1 s


async def test_a_token_that_expires_is_refused_from_then_on(
    guarded: Served, token_file: TokenFile
) -> None:
    token = token_file.add("guest", "info", expires_in=timedelta(seconds=1.5))
    await known(guarded, token)
    await known(guarded, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    with pytest.raises(grpc.aio.AioRpcError, match="the token has expired"):
        await guarded.stub.GetServerInfo(INFO, metadata=bearer(token))


async def test_a_file_that_cannot_be_used_leaves_the_tokens_as_they_are(
    guarded: Served, token_file: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    token = await added(guarded, token_file, "good", "info")
    for content in ("", "tokens: [", "tokens: [{name: x, sha256: omni_oops}]"):
        caplog.clear()
        token_file.path.write_text(content)
        await eventually(lambda: "cannot be used" in caplog.text, 5)
        assert "omni_oops" not in caplog.text
        assert await guarded.stub.GetServerInfo(INFO, metadata=bearer(token))
    token_file.path.write_text("tokens: []")
    await known(guarded, token, wanted=grpc.StatusCode.UNAUTHENTICATED)


async def test_a_revoked_token_leaves_running_requests_alone(
    guarded: Served, token_file: TokenFile
) -> None:
    token = await added(guarded, token_file, "leaver", "infer", "info")
    slow = [script(outputs=30, interval_ms=100)]
    call = guarded.stub.AddRequest(ask(stage_params=slow), metadata=bearer(token))
    assert (await call.read()).HasField("accepted")
    token_file.revoke("leaver")
    await known(guarded, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    assert (await rest_of(call))[-1].HasField("finished")
