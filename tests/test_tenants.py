"""Tenants: whose a request is, and that nobody else meets it."""

from __future__ import annotations

from typing import Any

import grpc

from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.running import rest_of, text_pipeline
from tests.secured import TokenFile, added, bearer, failure
from tests.support import Served, ask, script

HANGS = [script(outputs=3, hang_at=1)]


async def ending(call: Any) -> grpc.StatusCode:
    """How a stream ends of which something was read."""
    try:
        await rest_of(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


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
    guarded: Served, token_file: TokenFile
) -> None:
    ours = token_file.add("ours", "infer", tenant="acme")
    theirs = await added(guarded, token_file, "theirs", "infer", "info", tenant="umbrella")
    call = await opened(guarded, ours, "r-1", resumable=True)
    # To claim another tenant in the metadata helps nobody.
    foreign = (*bearer(theirs), ("omni-tenant", "acme"))
    for method, message in (
        ("StreamingUpdate", header("r-1")),
        ("SubmitInteraction", attach("r-1")),
    ):
        error = await failure(guarded, method, foreign, message.SerializeToString())
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    request = service_pb2.AbortRequest(request_ids=["r-1", "r-2"])
    answer = await guarded.stub.Abort(request, metadata=foreign)
    not_found = service_pb2.AbortResponse.OUTCOME_NOT_FOUND
    assert [result.outcome for result in answer.results] == [not_found, not_found]
    # It still runs, and its own tenant finds it.
    own = guarded.stub.SubmitInteraction(iter([attach("r-1")]), metadata=bearer(ours))
    assert (await own.read()).HasField("setup_complete")
    answer = await guarded.stub.Abort(request, metadata=bearer(ours))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
    assert (await ending(call)) is grpc.StatusCode.CANCELLED
    # And its end is nothing that others learn of.
    answer = await guarded.stub.Abort(request, metadata=foreign)
    assert answer.results[0].outcome == not_found
    answer = await guarded.stub.Abort(request, metadata=bearer(ours))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED


async def test_two_tenants_may_use_one_id_at_once(guarded: Served, token_file: TokenFile) -> None:
    ours = token_file.add("ours", "infer", tenant="acme")
    theirs = await added(guarded, token_file, "theirs", "infer", "info", tenant="umbrella")
    calls = [await opened(guarded, token, "same", stage_params=HANGS) for token in (ours, theirs)]
    again = guarded.stub.AddRequest(ask(request_id="same"), metadata=bearer(ours))
    assert (await again.code()) is grpc.StatusCode.ALREADY_EXISTS
    request = service_pb2.AbortRequest(request_ids=["same"])
    await guarded.stub.Abort(request, metadata=bearer(ours))
    assert (await ending(calls[0])) is grpc.StatusCode.CANCELLED
    assert not calls[1].done()
    calls[1].cancel()


async def test_two_tokens_of_a_tenant_share_its_requests(
    guarded: Served, token_file: TokenFile
) -> None:
    one = token_file.add("one", "infer", tenant="acme")
    two = await added(guarded, token_file, "two", "infer", "info", tenant="acme")
    call = await opened(guarded, one, "shared", stage_params=HANGS)
    request = service_pb2.AbortRequest(request_ids=["shared"])
    answer = await guarded.stub.Abort(request, metadata=bearer(two))
    assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
    assert (await ending(call)) is grpc.StatusCode.CANCELLED


async def test_a_budget_is_the_tokens_tenants_whatever_the_metadata_says(
    serve: Serve, token_file: TokenFile
) -> None:
    ours = token_file.add("ours", "infer", tenant="acme")
    theirs = token_file.add("theirs", "infer", tenant="umbrella")
    served = await serve(text_pipeline("budget"), auth=token_file.settings, max_tenant_requests=1)
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
