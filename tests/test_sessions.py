"""Sessions: how they begin, whom they hear, how they end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.running import replicas
from tests.sessions import (
    Request,
    Session,
    attached,
    check_order,
    film,
    id_of,
    session,
    talk,
)
from tests.streaming import opened
from tests.support import (
    TEXT,
    RichError,
    ask,
    client,
    collect,
    echo,
    events,
    eventually,
    refusal,
    script,
    sound,
    started,
    stream,
    stub_of,
    texts,
)

S = grpc.StatusCode
ABORTED = (S.CANCELLED, "ABORTED_BY_CLIENT")


def cause(error: RichError) -> tuple[grpc.StatusCode, str]:
    """The code and the reason."""
    return error.code, error.reason


# ---------------------------------------------------------------- how it begins


async def test_a_session_hears_all_that_a_plain_request_hears(stub: Any) -> None:
    plain = await collect(stub)
    async with session(stub, prompt={"text": "hello big world"}) as one:
        await one.half_close()
        await one.finished()
        assert one.kinds[:2] == ["setup_complete", "0/0 accepted"]
        assert texts(one.responses) == texts(plain) and sound(one.responses) == sound(plain)
        assert one.heard[0].setup_complete.request_id == one.responses[0].accepted.request_id
        assert one.heard[0].setup_complete.epoch == 0


async def test_the_server_names_what_has_no_name(stub: Any) -> None:
    async with session(stub, request_id="", prompt={"text": "hello"}) as one:
        await one.finished()
        assert id_of(one).startswith("req-")


async def test_metadata_name_request_and_pod(stub: Any) -> None:
    async with session(stub, request_id="s-meta", prompt={"text": "hello"}) as one:
        metadata = dict(await one.call.initial_metadata())
        assert metadata["omni-request-id"] == "s-meta" and metadata["omni-pod"]
        await one.finished()


NO_SETUP: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "setup"),
    "an update first": ([Request(update={"seq": 0, "text": "x"})], "setup"),
    "an event first": ([Request(event={"event_id": "e", "prompt": "x"})], "setup"),
    "an abort first": ([Request(abort={})], "setup"),
    "an empty message first": ([Request()], "setup"),
    "neither open nor attach": ([Request(setup={})], "setup"),
    "attach to no id": ([Request(setup={"attach": {}})], "setup.attach.request_id"),
    "setup twice": (
        [Request(setup={"open": {"resumable": True}}), Request(setup={"open": {}})],
        "setup",
    ),
    "an empty message": ([Request(setup={"open": {"resumable": True}}), Request()], "message"),
}


@pytest.mark.parametrize("name", NO_SETUP)
async def test_what_is_out_of_order_ends_the_call(
    name: str, stub: Any, echo_server: Server
) -> None:
    messages, field = NO_SETUP[name]
    data = [message.SerializeToString() for message in messages]
    error = await stream(echo_server, "SubmitInteraction", data)
    assert error is not None
    assert (*cause(error), list(error.violations)) == (
        S.INVALID_ARGUMENT,
        "INVALID_FIELD",
        [field],
    )


REFUSED: dict[str, tuple[dict[str, Any], S, str]] = {
    "no prompt": ({}, S.INVALID_ARGUMENT, "INVALID_FIELD"),
    "an unknown pipeline": ({"pipeline": "x"}, S.NOT_FOUND, "PIPELINE_NOT_FOUND"),
    "an unknown adapter": ({"lora": "x"}, S.NOT_FOUND, "LORA_NOT_FOUND"),
    "an id that is too long": ({"request_id": "x" * 300}, S.INVALID_ARGUMENT, "INVALID_FIELD"),
    "what no stage can honour": ({"priority": 1}, S.FAILED_PRECONDITION, "NOT_SUPPORTED"),
    "what the stage refuses": (
        {"stage_params": [script(prepare_fail=True)]},
        S.INVALID_ARGUMENT,
        "INVALID_FIELD",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_open_is_refused_as_a_plain_request_is(name: str, stub: Any) -> None:
    fields, code, reason = REFUSED[name]
    if name != "no prompt":
        fields = {"prompt": {"text": "hello"}, **fields}
    one = await Session(stub, open=fields).begin()
    error = await one.failed()
    assert cause(error) == (code, reason) and one.heard == []
    assert error.trailers["omni-pod"]
    plain = await refusal(
        stub, ask(**fields) if "prompt" in fields else None, prompt=fields.get("prompt")
    )
    assert (cause(error), error.violations) == (cause(plain), plain.violations)


async def test_an_id_in_flight_is_refused_and_its_session_goes_on(stub: Any) -> None:
    async with talk(stub) as first:
        second = await Session(stub, open={"request_id": id_of(first), "resumable": True}).begin()
        assert cause(await second.failed()) == (S.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        await first.update(0, "hello", end=True)
        await first.half_close()
        await first.finished()


async def test_a_full_server_refuses_and_says_when_to_come_back(serve: Serve) -> None:
    served = await serve(echo(), max_requests=1)
    async with talk(served.stub):
        second = await Session(served.stub, open={"resumable": True}).begin()
        error = await second.failed()
        assert cause(error) == (S.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry and error.pushback_ms


@pytest.mark.parametrize("outputs", [False, True])
async def test_attach_to_what_does_not_run_is_not_found(stub: Any, outputs: bool) -> None:
    async with session(stub, request_id="s-over", prompt={"text": "hello"}) as one:
        await one.finished()
    for request_id in ("nope", "s-over", "x" * 1000, "é\0"):
        attach = {"request_id": request_id, "receive_outputs": outputs}
        two = await Session(stub, attach=attach).begin()
        assert cause(await two.failed()) == (S.NOT_FOUND, "REQUEST_NOT_FOUND")


# ---------------------------------------------------------------- whom it hears


async def test_who_attached_hears_copies_from_now_on(stub: Any) -> None:
    async with session(stub, prompt={"text": "x"}, stage_params=film(40)) as owner:
        await owner.until(lambda s: len(s.responses) > 5)
        async with attached(stub, id_of(owner), outputs=True) as two:
            before = len(owner.responses)
            await owner.finished()
            assert await two.ended() is None
            copies = [r.SerializeToString() for r in two.responses]
    assert 0 < before - 2 <= two.responses[0].seq
    originals = [r.SerializeToString() for r in owner.responses]
    assert copies == originals[two.responses[0].seq :]
    assert two.responses[-1].WhichOneof("event") == "finished"


async def test_who_wants_no_outputs_gets_none(stub: Any) -> None:
    async with (
        session(stub, prompt={"text": "x"}, stage_params=film(10)) as owner,
        attached(stub, id_of(owner)) as two,
    ):
        await owner.finished()
        assert await two.ended() is None
        assert two.kinds == ["setup_complete"]


async def test_a_plain_request_can_be_attached_to(stub: Any) -> None:
    call = await started(stub, request_id="s-plain", stage_params=film(10))
    async with attached(stub, "s-plain", outputs=True) as two:
        rest = [response async for response in call]
        assert await two.ended() is None
        assert events(two.responses)[-1] == "finished"
        assert [r.seq for r in rest][-1] == two.responses[-1].seq


async def test_who_attached_leaves_and_the_request_goes_on(stub: Any) -> None:
    async with talk(stub, stage_params=film(30)) as owner:
        await owner.update(0, "x", end=True)
        for outputs in (False, True):
            async with attached(stub, id_of(owner), outputs=outputs) as two:
                await two.event("e", None if outputs else "x", negative_prompt="y")
            async with attached(stub, id_of(owner), outputs=outputs) as two:
                await two.half_close()
                await owner.until(lambda s: s.states("nothing") == [])
        await owner.half_close()
        await owner.finished()
        assert owner.responses[-1].seq > 10


async def test_who_attached_and_runs_out_of_time_leaves_the_request(stub: Any) -> None:
    async with session(stub, prompt={"text": "x"}, stage_params=film(40)) as owner:
        async with attached(stub, id_of(owner), outputs=True, timeout=0.3) as two:
            assert (await two.failed()).code is S.DEADLINE_EXCEEDED
        await owner.finished()


async def test_many_attach_and_all_hear_the_same(stub: Any, echo_server: Server) -> None:
    async with session(stub, prompt={"text": "x"}, stage_params=film(30)) as owner:
        request_id = id_of(owner)
        listeners = []
        for _ in range(5):
            one = Session(stub, attach={"request_id": request_id, "receive_outputs": True})
            listeners.append(await (await one.begin()).stands())
        await owner.finished()
        for one in listeners:
            assert await one.ended() is None
            check_order(one.heard, None)
            assert [r.seq for r in one.responses] == [
                r.seq for r in owner.responses[one.responses[0].seq :]
            ]


async def test_a_slow_listener_is_let_go_and_slows_nobody(serve: Serve) -> None:
    served = await serve(echo(), queue_bytes=1 << 20)
    # 40 MB: more than any window and buffer on the way.
    large = [script(outputs=200, bytes=200_000)]
    fields = {"prompt": {"text": "x"}, "output_modalities": [TEXT]}
    async with client(served.server) as channel:
        async with session(served.stub, stage_params=film(20, 50), **fields) as owner:
            await owner.finished()
        begun = time.perf_counter()
        async with (
            session(served.stub, stage_params=large, **fields) as owner,
            attached(stub_of(channel), id_of(owner), outputs=True) as slow,
        ):
            slow.pause()
            await owner.finished()
            took = time.perf_counter() - begun
            slow.resume()
            assert cause(await slow.failed()) == (S.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
    assert len(owner.text) == 40_000_000 and took < 15


async def test_what_waits_for_a_slow_listener_is_bounded(serve: Serve) -> None:
    served = await serve(echo(), queue_bytes=1 << 20)
    large = [script(outputs=100, bytes=200_000)]
    fields = {"prompt": {"text": "x"}, "output_modalities": [TEXT]}
    async with (
        client(served.server) as channel,
        session(served.stub, stage_params=large, **fields) as owner,
    ):
        run = served.server.engine.orchestrator.find(id_of(owner))
        async with attached(stub_of(channel), id_of(owner), outputs=True) as slow:
            slow.pause()
            [tap], most = run.delivery.taps, 0
            while not owner.over:
                most = max(most, tap.bytes)
                await asyncio.sleep(0)
            slow.resume()
            await slow.ended()
    # Text counts four bytes a character; one output may be over.
    assert most <= (1 << 20) + 4 * 210_000


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize("how", ["abort", "attached abort", "leave", "Abort"])
async def test_the_end_is_heard_by_all(stub: Any, how: str) -> None:
    async with (
        talk(stub, stage_params=film()) as owner,
        attached(stub, id_of(owner), outputs=True) as two,
        attached(stub, id_of(owner)) as three,
    ):
        await owner.update(0, "x", end=True)
        await owner.until(lambda s: s.text)
        match how:
            case "abort":
                await owner.send(abort={})
            case "attached abort":
                await three.send(abort={})
            case "leave":
                await owner.leave()
            case "Abort":
                await stub.Abort(service_pb2.AbortRequest(request_ids=[id_of(owner)]))
        if how != "leave":
            assert cause(await owner.failed()) == ABORTED
        assert cause(await two.failed()) == ABORTED
        assert cause(await three.failed()) == ABORTED


async def test_a_plain_reader_hears_of_the_abort(stub: Any) -> None:
    async with opened(stub, stage_params=film()) as request:
        async with attached(stub, request.id) as two:
            await two.send(abort={})
            assert cause(await two.failed()) == ABORTED
        error = await request.failed()
        assert cause(error) == ABORTED and error.trailers["omni-request-id"] == request.id


async def test_leaving_frees_every_stage(stub: Any, echo_server: Server) -> None:
    async with talk(stub, stage_params=film()) as owner:
        await owner.update(0, "x", end=True)
        await owner.until(lambda s: s.text)
        await owner.leave()
        await eventually(lambda: not echo_server.engine.orchestrator.statistics())


async def test_half_close_is_no_more_input_and_outputs_go_on(stub: Any) -> None:
    async with talk(stub, stage_params=[script(interval_ms=30)]) as owner:
        await owner.update(0, "one two three four ")
        await owner.half_close()
        await owner.finished()
        assert owner.text == "one two three four "


async def test_half_close_with_nothing_is_invalid(stub: Any) -> None:
    async with talk(stub) as owner:
        await owner.half_close()
        error = await owner.failed()
        assert (*cause(error), list(error.violations)) == (
            S.INVALID_ARGUMENT,
            "INVALID_FIELD",
            ["prompt"],
        )


async def test_the_deadline_ends_it_for_all(stub: Any) -> None:
    async with (
        talk(stub, timeout=0.6, stage_params=film()) as owner,
        attached(stub, id_of(owner), outputs=True) as two,
    ):
        await owner.update(0, "x", end=True)
        assert (await owner.failed()).code is S.DEADLINE_EXCEEDED
        error = await two.failed()
        assert cause(error) in ((S.DEADLINE_EXCEEDED, "DEADLINE"), ABORTED)


async def test_input_that_stays_away_ends_it(serve: Serve) -> None:
    served = await serve(echo({"input_timeout": 0.3}))
    async with talk(served.stub) as owner, attached(served.stub, id_of(owner)) as two:
        for one in (owner, two):
            assert cause(await one.failed()) == (S.DEADLINE_EXCEEDED, "INPUT_TIMEOUT")


async def test_a_stages_error_ends_it_for_all(stub: Any) -> None:
    broken = film(10, fail_at=5)
    async with (
        talk(stub, stage_params=broken) as owner,
        attached(stub, id_of(owner), outputs=True) as two,
    ):
        await owner.update(0, "x", end=True)
        for one in (owner, two):
            assert cause(await one.failed()) == (S.INTERNAL, "STAGE_ERROR")
    assert "word4" in owner.text and two.text


async def test_a_lost_replica_ends_it_for_all(serve: Serve) -> None:
    served = await serve(echo({"name": "mortal"}))
    async with (
        talk(served.stub, stage_params=film()) as owner,
        attached(served.stub, id_of(owner), outputs=True) as two,
    ):
        await owner.update(0, "x", end=True)
        await owner.until(lambda s: s.text)
        [replica] = replicas("mortal", "text")
        replica.kill()
        for one in (owner, two):
            assert cause(await one.failed()) == (S.ABORTED, "REPLICA_LOST")


async def test_drain_says_goodbye_first(serve: Serve) -> None:
    served = await serve(echo())
    async with (
        talk(served.stub, stage_params=film(40)) as owner,
        attached(served.stub, id_of(owner)) as two,
    ):
        await owner.update(0, "x", end=True)
        await owner.until(lambda s: s.text)
        stopping = asyncio.create_task(served.server.stop(drain_timeout=8))
        for one in (owner, two):
            await one.until(lambda s: "going_away" in s.kinds, within=2)
            [told] = [m.going_away for m in one.heard if m.HasField("going_away")]
            assert 7000 < told.time_left_ms <= 8000
        await owner.half_close()
        await owner.finished()
        assert await two.ended() is None
        async with asyncio.timeout(5):
            await stopping


async def test_drain_ends_what_does_not_end_itself(serve: Serve) -> None:
    served = await serve(echo())
    async with (
        talk(served.stub, stage_params=film()) as owner,
        attached(served.stub, id_of(owner)) as two,
    ):
        await owner.update(0, "x", end=True)
        await owner.until(lambda s: s.text)
        stopping = asyncio.create_task(served.server.stop(drain_timeout=0.3))
        for one in (owner, two):
            assert cause(await one.failed()) == (S.UNAVAILABLE, "DRAINING")
            assert "going_away" in one.kinds
        async with asyncio.timeout(5):
            await stopping
