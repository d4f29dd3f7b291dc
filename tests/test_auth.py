"""Bearer tokens: who may call what, and that tenants do not meet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
from tests.running import health_stub, rest_of, serving, text_pipeline
from tests.secured import TokenFile, bearer, listing
from tests.support import Served, ask, eventually, freed, rich_error, script

INFO = service_pb2.GetServerInfoRequest()
RESUME = admin_pb2.ResumeStageRequest(target={"stage": "text"})
HANGS = [script(outputs=3, hang_at=1)]


@dataclass(frozen=True)
class Secured:
    """One server with tokens for all tests here."""

    served: Served
    tokens: TokenFile


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """A server, and the file that it reads."""
    tokens = TokenFile(tmp_path_factory.mktemp("tokens"))
    tokens.add("first", "info")
    async with serving(text_pipeline("secured"), auth=tokens.settings, admin_port=0) as running:
        yield Secured(Served(running.server, running.omni, running.channel), tokens)


@pytest.fixture
async def served(secured: Secured) -> AsyncIterator[Served]:
    """The server. When the test is over, it must hold nothing."""
    yield secured.served
    await freed(secured.served.server)


@pytest.fixture
def tokens(secured: Secured) -> TokenFile:
    """Its tokens."""
    return secured.tokens


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


async def failure(served: Served, method: str, metadata: Any, message: bytes = b"") -> Any:
    """How a call with one message fails; None where it doesn't. As a unary call, whatever the
    method is: grpcio's streams lose a status that comes while they write."""
    call: Any = served.channel.unary_unary(f"/omni_grpc.v1.OmniService/{method}")
    try:
        await call(message, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return rich_error(error)
    return None


async def test_a_call_without_a_good_token_is_refused(served: Served) -> None:
    for metadata in REFUSED.values():
        for method in METHODS:
            error = await failure(served, method, metadata)
            assert error.code is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
            assert (error.reason, error.domain) == ("UNAUTHENTICATED", "omni-grpc")
            assert error.trailers["omni-pod"] == served.server.pod
            assert "omni_" not in error.message


async def test_how_a_token_is_read(served: Served, tokens: TokenFile) -> None:
    token = await added(served, tokens, "good", "info")
    twice = bearer(token) + bearer(token)
    assert (await failure(served, "GetLoad", twice)).code is grpc.StatusCode.UNAUTHENTICATED
    for scheme in ("bearer", "BEARER"):
        metadata = (("authorization", f"{scheme} {token}"),)
        assert await served.stub.GetServerInfo(INFO, metadata=metadata)


async def test_a_large_request_is_refused_before_it_is_read(served: Served) -> None:
    big = ask("x" * (32 << 20))
    call = served.stub.AddRequest(big, timeout=10)
    assert (await call.code()) is grpc.StatusCode.UNAUTHENTICATED
    assert (await served.stub.GetServerInfo(INFO).code()) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_needs_its_right_and_no_other(served: Served, tokens: TokenFile) -> None:
    rights = {right.value for right in Right}
    only = {right: bearer(tokens.add(right, right)) for right in rights}
    but = {right: bearer(tokens.add(f"not-{right}", *(rights - {right}))) for right in rights}
    await added(served, tokens, "last", "info")
    denied = grpc.StatusCode.PERMISSION_DENIED
    for method, right in METHODS.items():
        error = await failure(served, method, but[right])
        assert (error.code, error.reason) == (denied, "PERMISSION_DENIED"), method
        assert repr(right) in error.message
        error = await failure(served, method, only[right])
        assert error is None or error.code is not denied, method


async def test_an_operator_needs_the_right_on_the_admin_listener_too(
    served: Served, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omni_grpc.auth")
    user = bearer(await added(served, tokens, "user", "infer", "info"))
    operator = bearer(await added(served, tokens, "operator", "admin"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.admin_port}") as channel:
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
    served: Served, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = bearer(await added(served, tokens, "all", "infer", "info", "admin"))
    monkeypatch.delitem(auth.RIGHTS, "/omni_grpc.v1.OmniService/GetLoad")
    assert await served.stub.GetServerInfo(INFO, metadata=everything)
    call = served.stub.GetLoad(service_pb2.GetLoadRequest(), metadata=everything)
    assert (await call.code()) is grpc.StatusCode.PERMISSION_DENIED
    assert (await failure(served, "Nothing", ())).code is grpc.StatusCode.UNAUTHENTICATED
    assert (await failure(served, "Nothing", everything)).code is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- what needs no token


async def test_health_needs_no_token(served: Served) -> None:
    health = health_stub(served.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="omni-readiness"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_reflection_needs_a_token_where_that_is_set(
    served: Served, serve: Serve, tokens: TokenFile
) -> None:
    assert await listing(served.channel) == "OK"
    closed = await serve(
        text_pipeline("closed"), auth={**tokens.settings, "open_reflection": False}
    )
    assert await listing(closed.channel) == "UNAUTHENTICATED"
    user, reader = tokens.add("user", "infer"), tokens.add("reader", "info")
    await known(closed, reader)
    assert await listing(closed.channel, bearer(user)) == "PERMISSION_DENIED"
    assert await listing(closed.channel, bearer(reader)) == "OK"


# ---------------------------------------------------------------- a file that changes


async def test_a_token_comes_and_goes_while_the_server_runs(
    served: Served, tokens: TokenFile
) -> None:
    token = tokens.add("guest", "info")
    started = time.monotonic()
    await known(served, token)
    assert time.monotonic() - started < 5  # the goal is 1 s
    tokens.revoke("guest")
    started = time.monotonic()
    await known(served, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    assert time.monotonic() - started < 5  # the goal is 1 s


async def test_a_token_that_expires_is_refused_from_then_on(
    served: Served, tokens: TokenFile
) -> None:
    token = tokens.add("guest", "info", expires_in=timedelta(seconds=1.5))
    await known(served, token)
    await known(served, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    with pytest.raises(grpc.aio.AioRpcError, match="the token has expired"):
        await served.stub.GetServerInfo(INFO, metadata=bearer(token))


async def test_a_file_that_cannot_be_used_leaves_the_tokens_as_they_are(
    served: Served, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    token = await added(served, tokens, "good", "info")
    for content in ("", "tokens: [", "tokens: [{name: x, sha256: omni_oops}]"):
        caplog.clear()
        tokens.path.write_text(content)
        await eventually(lambda: "cannot be used" in caplog.text, 5)
        assert "omni_oops" not in caplog.text
        assert await served.stub.GetServerInfo(INFO, metadata=bearer(token))
    tokens.path.write_text("tokens: []")
    await known(served, token, wanted=grpc.StatusCode.UNAUTHENTICATED)


async def test_a_revoked_token_leaves_running_requests_alone(
    served: Served, tokens: TokenFile
) -> None:
    token = await added(served, tokens, "leaver", "infer", "info")
    slow = [script(outputs=30, interval_ms=100)]
    call = served.stub.AddRequest(ask(stage_params=slow), metadata=bearer(token))
    assert (await call.read()).HasField("accepted")
    tokens.revoke("leaver")
    await known(served, token, wanted=grpc.StatusCode.UNAUTHENTICATED)
    assert (await rest_of(call))[-1].HasField("finished")


# ---------------------------------------------------------------- tenants


async def opened(served: Served, token: str, request_id: str, **fields: Any) -> Any:
    """A request that was accepted."""
    request = ask(request_id=request_id, **fields)
    call = served.stub.AddRequest(request, metadata=bearer(token))
    assert (await call.read()).accepted.request_id == request_id
    return call


def attach(request_id: str) -> service_pb2.SubmitInteractionRequest:
    """The first message of a session on a request that runs."""
    setup = {"attach": {"request_id": request_id, "receive_outputs": True}}
    return service_pb2.SubmitInteractionRequest(setup=setup)


def header(request_id: str) -> service_pb2.StreamingUpdateRequest:
    """The first message of a feeder."""
    return service_pb2.StreamingUpdateRequest(header={"request_id": request_id})


async def test_a_tenant_does_not_meet_the_requests_of_another(
    served: Served, tokens: TokenFile
) -> None:
    ours = tokens.add("ours", "infer", tenant="acme")
    theirs = await added(served, tokens, "theirs", "infer", "info", tenant="umbrella")
    call = await opened(served, ours, "r-1", resumable=True)
    # To claim another tenant in the metadata helps nobody.
    foreign = (*bearer(theirs), ("omni-tenant", "acme"))
    for method, message in (
        ("StreamingUpdate", header("r-1")),
        ("SubmitInteraction", attach("r-1")),
    ):
        error = await failure(served, method, foreign, message.SerializeToString())
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    request = service_pb2.AbortRequest(request_ids=["r-1", "r-2"])
    answer = await served.stub.Abort(request, metadata=foreign)
    not_found = service_pb2.AbortResponse.OUTCOME_NOT_FOUND
    assert [result.outcome for result in answer.results] == [not_found, not_found]
    # It still runs, and its own tenant finds it.
    own = served.stub.SubmitInteraction(iter([attach("r-1")]), metadata=bearer(ours))
    assert (await own.read()).HasField("setup_complete")
    answer = await served.stub.Abort(request, metadata=bearer(ours))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
    assert (await ending(call)) is grpc.StatusCode.CANCELLED
    # And its end is nothing that others learn of.
    answer = await served.stub.Abort(request, metadata=foreign)
    assert answer.results[0].outcome == not_found
    answer = await served.stub.Abort(request, metadata=bearer(ours))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_two_tenants_may_use_one_id_at_once(served: Served, tokens: TokenFile) -> None:
    ours = tokens.add("ours", "infer", tenant="acme")
    theirs = await added(served, tokens, "theirs", "infer", "info", tenant="umbrella")
    calls = [await opened(served, token, "same", stage_params=HANGS) for token in (ours, theirs)]
    again = served.stub.AddRequest(ask(request_id="same"), metadata=bearer(ours))
    assert (await again.code()) is grpc.StatusCode.ALREADY_EXISTS
    request = service_pb2.AbortRequest(request_ids=["same"])
    await served.stub.Abort(request, metadata=bearer(ours))
    assert (await ending(calls[0])) is grpc.StatusCode.CANCELLED
    assert not calls[1].done()
    calls[1].cancel()


async def test_two_tokens_of_a_tenant_share_its_requests(served: Served, tokens: TokenFile) -> None:
    one = tokens.add("one", "infer", tenant="acme")
    two = await added(served, tokens, "two", "infer", "info", tenant="acme")
    call = await opened(served, one, "shared", stage_params=HANGS)
    request = service_pb2.AbortRequest(request_ids=["shared"])
    answer = await served.stub.Abort(request, metadata=bearer(two))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
    assert (await ending(call)) is grpc.StatusCode.CANCELLED


async def test_a_budget_is_the_tokens_tenants_whatever_the_metadata_says(
    serve: Serve, tokens: TokenFile
) -> None:
    ours = tokens.add("ours", "infer", tenant="acme")
    theirs = tokens.add("theirs", "infer", tenant="umbrella")
    served = await serve(text_pipeline("budget"), auth=tokens.settings, max_tenant_requests=1)
    first = await opened(served, ours, "first", stage_params=HANGS)
    disguised = (*bearer(ours), ("omni-tenant", "umbrella"))
    second = served.stub.AddRequest(ask(), metadata=disguised)
    assert (await second.code()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    third = await opened(served, theirs, "third", stage_params=HANGS)
    for call in (first, third):
        call.cancel()


async def test_without_tokens_a_request_is_found_whatever_tenant_is_named(serve: Serve) -> None:
    served = await serve(text_pipeline("trusting"))
    call = served.stub.AddRequest(
        ask(request_id="r", stage_params=HANGS), metadata=(("omni-tenant", "acme"),)
    )
    assert (await call.read()).HasField("accepted")
    answer = await served.stub.Abort(service_pb2.AbortRequest(request_ids=["r"]))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED


# ---------------------------------------------------------------- helpers


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


async def ending(call: Any) -> grpc.StatusCode:
    """How a stream ends of which something was read."""
    try:
        await rest_of(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def added(served: Served, tokens: TokenFile, name: str, *rights: str, **more: Any) -> str:
    """A new token, when the server knows it."""
    token = tokens.add(name, *rights, **more)
    async with asyncio.timeout(5):
        while True:
            call = served.stub.GetServerInfo(INFO, metadata=bearer(token))
            if (await call.code()) is not grpc.StatusCode.UNAUTHENTICATED:
                return token
            await asyncio.sleep(0.02)
