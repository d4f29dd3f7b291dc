"""Guidance companions: all or nothing, on one replica, handed on once with their parent, and never
in part. Their pipeline is thinker (text, two replicas) → painter, whose picture tells what came."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from omni_grpc import params as params_module
from omni_grpc import watch
from omni_grpc.channel import Channel
from omni_grpc.config import PipelineConfig
from omni_grpc.engine import Engine
from omni_grpc.errors import InternalError
from omni_grpc.ipc import Submit, Task
from omni_grpc.run import Run
from omni_grpc.server import Server
from omni_grpc.types import (
    CustomParams,
    DiffusionParams,
    Prompt,
    Request,
    RequestOptions,
    StageParams,
    Text,
)
from omni_grpc.v1 import params_pb2, service_pb2
from tests.conftest import Serve
from tests.guided import SECRET, drawn, guided, listed, thinking
from tests.running import serving
from tests.streaming import chunk, new_id, opened, refused
from tests.support import (
    IMAGE,
    TEXT,
    Response,
    RichError,
    broken_off,
    client,
    collect,
    events,
    eventually,
    freed,
    in_flight,
    refusal,
    rich_error,
    running,
    script,
    stub_of,
    texts,
)

S = grpc.StatusCode
LONG = 3_600_000
PLAIN: dict[str, Any] = {}


def streaming() -> PipelineConfig:
    """Stages that take segments, with an expansion."""
    stages = [
        {"name": "words", "engine": "fake", "output": "text"},
        {
            "name": "sound",
            "engine": "fake",
            "engine_args": {"modality": "audio"},
            "inputs": ["words"],
            "output": "audio",
            "bridge": "tests.guided:Pair",
        },
    ]
    content = {"name": "streaming", "guidance": True, "expansion": "tests.guided:told"}
    return PipelineConfig.model_validate(content | {"stages": stages})


def two() -> dict[str, Any]:
    """A stage of two replicas that come back at once."""
    return {"replicas": 2, "restart": {"backoff": 0.1, "budget": 1000}}


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """The pipelines `guided`, `bridgeless` (the same stages) and `streaming`."""
    forward = {"bridge": "question"}
    configs = [guided("guided", two(), retry=False), guided("bridgeless", two(), forward)]
    async with serving(*configs, streaming()) as served:
        yield served.server


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    """A client of it. When the test is over, nothing is left."""
    async with client(server) as channel:
        yield stub_of(channel)
    await freed(server, 5)
    await eventually(lambda: ready(server), 10)


def ready(server: Server) -> bool:
    """Whether all replicas serve."""
    return all(pool.ready_replicas == pool.config.replicas for pool in server.engine.pools)


def wish(*companions: tuple[str, str, dict[str, Any]], **fields: Any) -> Any:
    """A request with these companions."""
    negative = fields.pop("negative_text", listed(*companions))
    prompt = {"text": fields.pop("text", "a ring"), "negative_text": negative}
    return service_pb2.AddRequestRequest(prompt=prompt, **fields)


class Sent:
    """Batches of messages that the server sends to replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[Any]] = []
        encoded = Channel._encoded

        def recorded(channel: Channel[Any, Any], batch: list[Any]) -> bytes:
            self.batches.append(batch)
            return encoded(channel, batch)

        monkeypatch.setattr(Channel, "_encoded", recorded)

    def groups(self) -> list[list[Task]]:
        """The tasks of each batch that holds some."""
        submits = [[m.task for m in batch if isinstance(m, Submit)] for batch in self.batches]
        return [tasks for tasks in submits if tasks]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What the server sends from now on."""
    return Sent(monkeypatch)


# ---------------------------------------------------------------- what they are


async def test_they_are_built_only_where_they_are_needed(stub: Any, sent: Sent) -> None:
    one = ("negative", "dull", PLAIN)
    await collect(stub, wish(one, output_modalities=[TEXT]))
    await collect(stub, service_pb2.AddRequestRequest(prompt={"text": "a ring"}))
    await collect(stub, wish())
    assert [len(group) for group in sent.groups()].count(1) == len(sent.groups())
    await collect(stub, wish(one))
    await collect(stub, wish(one, output_modalities=[IMAGE]))
    assert sorted(len(group) for group in sent.groups())[-2:] == [2, 2]


async def test_each_has_its_own_id_role_and_parameters(stub: Any, sent: Sent) -> None:
    companions = [
        ("negative", "dull", PLAIN),
        ("style#-2", "old", {"first_ms": 1.0, "outputs": 2}),
        ("style#-2", "new", {"interval_ms": 2.0}),
    ]
    request = wish(*companions, request_id="group", stage_params=thinking(first_ms=5.0))
    parent, negative = drawn(await collect(stub, request))
    assert [role for role, _ in negative] == ["negative", "style#-2", "style#-2"]
    assert negative[1][1] == "word0 word1 "
    told = [json.loads(text) for text in (parent, negative[0][1], negative[2][1])]
    assert [one["said"] for one in told] == ["a ring", "dull", "new"]
    assert [one["params"] for one in told] == [{"first_ms": 5}, {}, {"interval_ms": 2}]
    ids = [task.request_id for task in sent.groups()[0]]
    assert ids == ["group#negative-0", "group#style#-2-1", "group#style#-2-2", "group"]
    assert [one["id"] for one in told] == [ids[3], ids[0], ids[2]]
    assert [one["information"]["global_request_id"] for one in told] == [ids[3], ids[0], ids[2]]


async def test_they_inherit_what_goes_with_the_prompt(stub: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = wish(
        ("negative", "dull", PLAIN),
        arrival_time={"seconds": 1_700_000_000, "nanos": 500_000_000},
        additional_information={"mine": 1},
    )
    call = stub.AddRequest(request, timeout=13, metadata=(("traceparent", trace),))
    parent, ((_, negative),) = drawn([response async for response in call])
    told = [json.loads(parent), json.loads(negative)]
    for one in told:
        assert one["arrival_time"] == 1_700_000_000.5
        assert one["trace"] == {"traceparent": trace}
        assert one["information"]["mine"] == 1
    # grpc-timeout travels rounded up.
    assert 0 < told[0]["timeout_s"] <= 13.5
    assert abs(told[0]["timeout_s"] - told[1]["timeout_s"]) < 0.5


def in_process(engine: Engine, *, options: RequestOptions, **values: Any) -> Run:
    """A run that was opened past the checks of what its stage can honour."""
    prompt = Prompt(Text("a ring"), negative_text=listed(("negative", "dull", values)))
    plan = engine.plan(Request("", "guided", prompt))
    request = Request(new_id("run"), "guided", prompt, options=options)
    return engine.orchestrator.open(replace(plan, request=request))


async def test_they_inherit_lora_priority_and_all_options(server: Server, sent: Sent) -> None:
    options = RequestOptions(
        lora="style", priority=3, data_parallel_rank=1, cache_salt="s", tenant="t"
    )
    run = in_process(server.engine, options=options)
    await run.admit()
    run.close(None)
    companion, parent = sent.groups()[0]
    for name in ("lora", "priority", "data_parallel_rank", "cache_salt", "tenant"):
        assert getattr(companion.options, name) == getattr(parent.options, name)
        assert getattr(companion.options, name) == getattr(options, name)
    await freed(server, 5)


async def test_a_group_is_one_message_to_one_replica(stub: Any, sent: Sent) -> None:
    companions = [("a", "one", PLAIN), ("b", "two", PLAIN), ("c", "three", PLAIN)]
    pictures = await asyncio.gather(*(collect(stub, wish(*companions)) for _ in range(20)))
    replicas = set()
    for responses in pictures:
        parent, negative = drawn(responses)
        group = [json.loads(text)["replica"] for text in (parent, *(text for _, text in negative))]
        assert len(set(group)) == 1
        replicas.add(group[0])
    assert replicas == {0, 1}, "all groups went to one replica: the test shows nothing"
    parents = [[t for t in tasks if "#" in t.request_id] for tasks in sent.groups()]
    assert sum(map(len, parents)) == 60
    for tasks in sent.groups():
        ids = [task.request_id for task in tasks]
        for parent_id in (i for i in ids if "#" not in i and i.startswith("req-")):
            mine = [i for i in ids if i.startswith(parent_id)]
            assert len(mine) in (1, 4), "the group was sent in parts"


async def test_they_emit_nothing_and_their_use_is_counted(stub: Any) -> None:
    companion = ("negative", "one two three four", {"outputs": 5})
    responses = await collect(stub, wish(companion, stage_params=thinking(outputs=2)))
    assert texts(responses) == "word0 word1 "
    usage = responses[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2 + 4, 2 + 5)
    reasons = [(f.stage, f.index) for f in responses[-1].finished.finish_reasons]
    assert sorted(reasons) == [("painter", 0), ("thinker", 0)]
    assert [r.seq for r in responses] == list(range(len(responses)))


async def test_an_expansion_cannot_change_the_clients_prompt(stub: Any) -> None:
    prompt = {"token_ids": {"ids": [4, 5]}, "negative_text": listed(("n", "dull", PLAIN))}
    parent, _ = drawn(await collect(stub, service_pb2.AddRequestRequest(prompt=prompt)))
    assert json.loads(parent)["said"] == [4, 5]


# ---------------------------------------------------------------- handing on

SPEEDS = {"parent": (0, 60, 120), "companions": (150, 60, 0), "in between": (60, 0, 120)}


@pytest.mark.parametrize("first", SPEEDS)
async def test_handed_on_once_in_order_whoever_ends_first(stub: Any, first: str) -> None:
    parent_ms, one_ms, two_ms = SPEEDS[first]
    companions = [
        ("one", "x", {"outputs": 1, "first_ms": float(one_ms)}),
        ("two", "y", {"outputs": 2, "first_ms": float(two_ms)}),
    ]
    params = thinking(outputs=3, first_ms=parent_ms)
    prompt, negative = drawn(await collect(stub, wish(*companions, stage_params=params)))
    assert prompt == "word0 word1 word2 "
    assert negative == [["one", "word0 "], ["two", "word0 word1 "]]


async def test_the_next_stage_waits_for_the_last_companion(stub: Any, server: Server) -> None:
    slow = ("slow", "x", {"outputs": 2, "hang_at": 1})
    quick = ("quick", "y", PLAIN)
    call = stub.AddRequest(wish(quick, slow, stage_params=thinking(outputs=1)), timeout=20)
    got = [await call.read() for _ in range(2)]
    assert events(got) == ["accepted", "output"]
    await eventually(lambda: running(server)["thinker"] == 1, 5)
    await asyncio.sleep(0.1)
    assert running(server)["painter"] == 0
    call.cancel()


async def test_accepted_is_first_where_a_companion_is_admitted_last(stub: Any) -> None:
    """The parent gives its first outputs before."""
    late = ("late", "x", {"prepare_ms": 150.0, "outputs": 1})
    responses = await collect(stub, wish(late, stage_params=thinking(outputs=3, interval_ms=10)))
    assert events(responses)[0] == "accepted" and events(responses).count("accepted") == 1
    assert drawn(responses) == ("word0 word1 word2 ", [["late", "word0 "]])


# ---------------------------------------------------------------- guidance


@pytest.fixture
def diffusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stages of engine `python` take the parameters of diffusion."""
    monkeypatch.setitem(params_module.KIND_BY_ENGINE, "python", DiffusionParams)
    yield


def scaled(scale: float) -> list[params_pb2.StageParams]:
    """Parameters of the painter."""
    return [params_pb2.StageParams(stage="painter", diffusion={"guidance_scale": scale})]


async def test_guidance_is_one_companion_above_scale_one(
    serve: Serve, diffusing: None, sent: Sent
) -> None:
    thinker = {"engine": "fake", "model": ""}
    painter = {"bridge": "guided-prompt", "defaults": {"guidance_scale": 3.0}}
    served = await serve(guided("scales", thinker, painter, expansion="guidance"))

    async def negative(text: str | None, scale: float | None) -> Any:
        prompt = {"text": "a ring"} | ({"negative_text": text} if text is not None else {})
        params = scaled(scale) if scale is not None else []
        request = service_pb2.AddRequestRequest(prompt=prompt, stage_params=params)
        content = json.loads(
            b"".join(r.output.image.data for r in await collect(served.stub, request))
        )
        return content[:2]

    assert await negative("very dull", 2.0) == ["a ring", "very dull"]
    assert await negative("very dull", None) == ["a ring", "very dull"]
    assert await negative(None, 2.0) == ["a ring", None]
    assert await negative(None, 1.0) == ["a ring", None]
    error = await refusal(
        served.stub,
        service_pb2.AddRequestRequest(
            prompt={"text": "a ring", "negative_text": "dull"}, stage_params=scaled(1.0)
        ),
    )
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert list(error.violations) == ["prompt.negative_text"]
    ids = [task.request_id for group in sent.groups() for task in group]
    roles = [i.rpartition("#")[2] for i in ids if "#" in i]
    assert roles == ["negative-0", "negative-0"]


# ---------------------------------------------------------------- all or nothing

FINE = ("fine", "x", {"first_ms": float(LONG)})
NOT_ADMITTED: dict[str, tuple[Any, str, str]] = {
    "the expansion raises": ("break", "INTERNAL", ""),
    "the expansion raises late": ("break late", "INTERNAL", ""),
    "an override of nothing": (listed(FINE, ("n", "x", {"wrong": 1})), "INTERNAL", ""),
    "an override of the wrong type": (listed(("n", "x", {"values": 7})), "INTERNAL", ""),
    "a script of the wrong type": (
        listed(FINE, ("n", "x", {"outputs": "many"})),
        "INVALID_FIELD",
        "stage_params(thinker).outputs",
    ),
    "a companion is refused": (
        listed(FINE, ("n", "x", {"prepare_fail": True}), FINE),
        "INVALID_FIELD",
        "stage_params(thinker).prepare_fail",
    ),
    "the last is refused late": (
        listed(FINE, ("n", "x", {"prepare_fail": True, "prepare_ms": 100.0})),
        "INVALID_FIELD",
        "stage_params(thinker).prepare_fail",
    ),
    "an empty prompt": (listed(FINE, ("n", "", PLAIN)), "INVALID_FIELD", "prompt"),
}


@pytest.mark.parametrize("why", NOT_ADMITTED)
async def test_one_that_fails_admits_nothing(stub: Any, server: Server, why: str) -> None:
    negative, reason, path = NOT_ADMITTED[why]
    responses, error = await broken_off(
        stub, wish(negative_text=negative, request_id="nothing"), timeout=10
    )
    assert (responses, error.reason) == ([], reason)
    assert list(error.violations) == ([path] if path else [])
    assert SECRET not in error.message
    await freed(server, 5)
    # And the id is free at once.
    assert drawn(await collect(stub, wish(request_id="nothing")))[0]


async def test_a_parent_that_is_refused_ends_its_companions(stub: Any, server: Server) -> None:
    params = thinking(prepare_fail=True, prepare_ms=50)
    error = await refusal(stub, wish(FINE, FINE, stage_params=params))
    assert list(error.violations) == ["stage_params[0].custom.prepare_fail"]
    await freed(server, 5)


async def test_companions_that_no_bridge_can_hand_on_are_refused(stub: Any) -> None:
    """Else the next stage would work unguided, and nobody would know."""
    responses, error = await broken_off(stub, wish(("n", "x", PLAIN), pipeline="bridgeless"))
    assert (responses, error.reason) == ([], "INTERNAL")
    assert (await collect(stub, wish(pipeline="bridgeless")))[-1].HasField("finished")


async def test_streamed_input_has_no_companions(stub: Any) -> None:
    """It is refused, not left unguided."""
    request = wish(("n", "x", PLAIN), pipeline="streaming", resumable=True)
    error = await refusal(stub, request, timeout=10)
    assert (error.code, error.reason) == (S.FAILED_PRECONDITION, "NOT_SUPPORTED")
    assert list(error.violations) == ["resumable"]
    async with opened(stub, new_id(), pipeline="streaming") as opened_request:
        bad = chunk(0, prompt={"text": "a", "negative_text": listed(("n", "x", PLAIN))})
        error = await refused(stub, opened_request.id, bad)
        assert list(error.violations) == ["chunk.prompt.negative_text"]


# ---------------------------------------------------------------- failures

BROKEN: dict[str, tuple[dict[str, Any], S, str]] = {
    "errors at once": ({"fail_at": 0}, S.INTERNAL, "STAGE_ERROR"),
    "errors late": ({"fail_at": 1, "first_ms": 100.0}, S.INTERNAL, "STAGE_ERROR"),
    "dies after the parents text": (
        {"die_at": 0, "first_ms": 200.0},
        S.ABORTED,
        "REPLICA_LOST",
    ),
    "hangs": ({"hang_at": 0}, S.DEADLINE_EXCEEDED, "STAGE_TIMEOUT"),
    "hangs in its preparation": (
        {"prepare_ms": float(LONG)},
        S.DEADLINE_EXCEEDED,
        "STAGE_TIMEOUT",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_companion_that_breaks_ends_its_parent(
    stub: Any, server: Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    values, code, reason = BROKEN[how]
    monkeypatch.setattr(watch, "GROUP_TIMEOUT_S", 0.3)
    responses, error = await broken_off(
        stub,
        wish(("fine", "x", PLAIN), ("broken", "y", values), stage_params=thinking(outputs=1)),
    )
    assert (error.code, error.reason) == (code, reason)
    assert "#" not in error.message and "broken" not in error.message
    assert not any(r.output.HasField("image") for r in responses), "an unguided picture"
    await freed(server, 5)


async def test_a_companion_that_dies_before_any_output(stub: Any) -> None:
    params = thinking(first_ms=LONG)
    responses, error = await broken_off(stub, wish(("n", "x", {"die_at": 0}), stage_params=params))
    assert "output" not in events(responses)
    assert (error.code, error.reason) == (S.UNAVAILABLE, "STAGE_UNAVAILABLE")


async def test_a_slow_companion_is_waited_for(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GROUP_TIMEOUT_S", 10)
    slow = ("slow", "x", {"outputs": 2, "first_ms": 700.0})
    responses = await collect(stub, wish(slow, stage_params=thinking(outputs=1)))
    assert drawn(responses) == ("word0 ", [["slow", "word0 word1 "]])


async def test_a_group_is_tried_again_as_a_whole(serve: Serve, sent: Sent) -> None:
    """A replica is lost before it gave anything: the group goes to another, once."""
    config = guided("again", {"replicas": 2, "restart": {"backoff": 3600}})
    served = await serve(config)
    request = wish(
        ("one", "x", {"first_ms": 300.0}),
        ("two", "y", {"first_ms": 300.0, "outputs": 2}),
        stage_params=thinking(first_ms=400, outputs=1),
    )
    collecting = asyncio.create_task(collect(served.stub, request))
    await eventually(lambda: running(served.server)["thinker"] == 3, 5)
    pool = next(p for p in served.server.engine.pools if p.config.name == "thinker")
    replicas = [slot.replica for slot in pool._slots]
    (held,) = [replica for replica in replicas if replica is not None and replica.running]
    held.kill()
    responses = await collecting
    assert events(responses).count("accepted") == 1
    prompt, ((one, told), two) = drawn(responses)
    assert (prompt, one, two) == ("word0 ", "one", ["two", "word0 word1 "])
    assert json.loads(told)["said"] == "x"
    groups = [[task.request_id for task in group] for group in sent.groups() if len(group) == 3]
    assert len(groups) == 2 and groups[0] == groups[1]


PARENTS: dict[str, tuple[dict[str, Any], S]] = {
    "errors": ({"fail_at": 1, "outputs": 3}, S.INTERNAL),
    "cancelled": ({"hang_at": 1, "outputs": 3}, S.CANCELLED),
    "aborted": ({"hang_at": 1, "outputs": 3}, S.CANCELLED),
    "its deadline passes": ({"hang_at": 1, "outputs": 3}, S.DEADLINE_EXCEEDED),
    "aborted when it has ended": ({"outputs": 1}, S.CANCELLED),
    "its deadline passes when it has ended": ({"outputs": 1}, S.DEADLINE_EXCEEDED),
}


@pytest.mark.parametrize("how", PARENTS)
async def test_a_parent_that_ends_ends_its_companions(stub: Any, server: Server, how: str) -> None:
    values, code = PARENTS[how]
    request = wish(FINE, FINE, stage_params=thinking(**values), request_id="ends")
    call = stub.AddRequest(request, timeout=0.6 if "deadline" in how else 20)
    outcome = asyncio.create_task(ending(call))
    expected = 2 if "ended" in how else 3
    if how != "errors":
        await eventually(lambda: running(server)["thinker"] == expected, 5)
    if "abort" in how:
        await eventually(lambda: server.engine.orchestrator.find("ends").delivery.emitted, 5)
        await stub.Abort(service_pb2.AbortRequest(request_ids=["ends"]))
        assert in_flight(server) == 0, "it answers when all is free"
    elif how == "cancelled":
        call.cancel()
    responses, error = await outcome
    assert error is not None and error.code is code
    assert not any(r.output.HasField("image") for r in responses)
    await freed(server, 5)


async def ending(call: Any) -> tuple[list[Response], RichError | None]:
    """What a call gave, and how it failed if it did."""
    responses: list[Response] = []
    try:
        async for response in call:
            responses.append(response)  # noqa: PERF401 - what came before the error counts
    except grpc.aio.AioRpcError as error:
        return responses, rich_error(error)
    except asyncio.CancelledError:
        return responses, RichError(S.CANCELLED, "", {}, None, None, "", "", {})
    return responses, None


async def test_a_bridge_that_raises_when_it_joins(stub: Any) -> None:
    one = ("n", "x", {"first_ms": 50.0})
    responses, error = await broken_off(stub, wish(one, text="break in join"))
    assert (error.reason, SECRET in error.message) == ("INTERNAL", False)
    assert not any(r.output.HasField("image") for r in responses)


async def test_a_stage_that_is_gone_when_the_group_is_complete(serve: Serve) -> None:
    painter = {"restart": {"backoff": 3600}}
    served = await serve(guided("gone", None, painter))
    await refusal(served.stub, stage_params=[script("painter", die_at=0)])
    late = ("n", "x", {"first_ms": 100.0})
    for request, reason in (
        (wish(late), "REPLICA_LOST"),
        (wish(late, output_modalities=[IMAGE]), "STAGE_UNAVAILABLE"),
    ):
        assert (await refusal(served.stub, request)).reason == reason
    await freed(served.server, 5)


async def test_a_late_refusal_takes_nothing_from_a_finished_request(server: Server) -> None:
    """All outputs are there and wait for the client: what is aborted then may end as it likes."""
    engine = server.engine
    prompt = Prompt(Text("a ring"), negative_text=listed(("n", "x", PLAIN)))
    params = (StageParams("thinker", CustomParams({"outputs": 1})),)
    run = await engine.submit(Request("late", "guided", prompt, params))
    await eventually(lambda: run.completed, 5)
    (member,) = run._graph.group.members
    member.on_refused(InternalError("aborted"))
    run._graph.entry.on_refused(InternalError("aborted"))
    member.on_ended(InternalError("aborted"))
    member.on_lost()
    kinds = []
    while (numbered := await run.next()) is not None:
        kinds.append(type(getattr(numbered, "event", None)).__name__)
    assert kinds[0] == "Accepted" and kinds[-1] == "Finished"
    await freed(server, 5)


# ---------------------------------------------------------------- a thousand schedules

ACTIONS = ("read",) * 6 + ("cancel", "abort", "deadline")


class Schedule:
    """One request with random timing and faults, and what may become of it."""

    def __init__(self, dice: random.Random, number: int, *, deadly: bool) -> None:
        self.id = f"schedule-{number}"
        self._dice = dice
        self.parent = self._script(deadly)
        count = dice.choice((0, 1, 1, 2, 3))
        self.companions = [(f"role{n}", "x y", self._script(deadly)) for n in range(count)]
        self.painter = self._script(False, 1) if dice.random() < 0.1 else {}
        self.action = dice.choice(ACTIONS)
        self.after = dice.uniform(0, 0.08)
        self.deadly = deadly

    def _script(self, deadly: bool, outputs: int | None = None) -> dict[str, Any]:
        dice = self._dice
        values: dict[str, Any] = {"outputs": dice.randint(0, 3) if outputs is None else outputs}
        for name, most in (("prepare_ms", 20), ("first_ms", 30), ("interval_ms", 8)):
            if dice.random() < 0.4:
                values[name] = dice.uniform(0, most)
        fault = dice.random()
        if fault < 0.06:
            values["fail_at"] = dice.randint(0, values["outputs"])
        elif fault < 0.09:
            values["prepare_fail"] = True
        elif fault < 0.12:
            values["hang_at"] = dice.randint(0, values["outputs"])
        elif deadly and fault < 0.15:
            values["die_at"] = dice.randint(0, values["outputs"])
        return values

    def has(self, fault: str) -> bool:
        """Whether any of its tasks has this fault."""
        scripts = [self.parent, *(values for _, _, values in self.companions), self.painter]
        return any(fault in values for values in scripts)

    def allowed(self) -> set[str]:
        """The reasons with which it may end; "" is success."""
        reasons = set()
        for fault, reason in (("fail_at", "STAGE_ERROR"), ("prepare_fail", "INVALID_FIELD")):
            if self.has(fault):
                reasons.add(reason)
        if self.has("hang_at"):
            reasons |= {"DEADLINE", "STAGE_TIMEOUT"}
        if not reasons and not self.has("die_at"):
            reasons.add("")
        if self.action in ("cancel", "abort"):
            reasons |= {"CANCELLED", "ABORTED_BY_CLIENT", ""}
        if self.action == "deadline":
            reasons |= {"DEADLINE", ""}
        if self.deadly:
            # Whoever is on a replica that somebody else kills goes with it.
            reasons |= {"STAGE_UNAVAILABLE", "REPLICA_LOST"}
        broken = any(map(self.has, ("fail_at", "prepare_fail", "hang_at", "die_at")))
        return reasons - {""} if broken else reasons

    async def run(self, stub: Any) -> None:
        """Runs it, and checks what came."""
        params = [script("thinker", **self.parent), script("painter", **self.painter)]
        request = wish(*self.companions, request_id=self.id, stage_params=params)
        timeout = self.after if self.action == "deadline" else 1.5 if self.has("hang_at") else 20
        call = stub.AddRequest(request, timeout=max(0.001, timeout))
        outcome = asyncio.create_task(ending(call))
        if self.action in ("cancel", "abort"):
            await asyncio.sleep(self.after)
            if self.action == "cancel":
                call.cancel()
            else:
                await stub.Abort(service_pb2.AbortRequest(request_ids=[self.id]))
        responses, error = await outcome
        self.check(responses, error)

    def check(self, responses: list[Response], error: RichError | None) -> None:
        """Exactly one right ending, and a picture with all of its guidance or none."""
        reason = "" if error is None else error.reason or _own(error)
        told = (self.id, self.parent, self.companions, self.painter, self.action, reason, error)
        assert reason in self.allowed(), (told, self.allowed())
        kinds = events(responses)
        assert [r.seq for r in responses] == list(range(len(responses))), told
        assert kinds.count("accepted") == (1 if kinds else 0), told
        assert not kinds or kinds[0] == "accepted", told
        if error is None or error.reason:  # else the client left by itself, maybe in that moment
            assert kinds.count("finished") == (error is None), told
        if error is None:
            prompt, negative = drawn(responses)
            assert prompt == said(self.parent), told
            expected = [[role, said(values)] for role, _, values in self.companions]
            assert (negative or []) == expected, told


def said(values: dict[str, Any]) -> str:
    """What a thinker says by its script."""
    return "".join(f"word{n} " for n in range(values["outputs"]))


def _own(error: RichError) -> str:
    """The reason of a status that the client's library made by itself."""
    return {S.CANCELLED: "CANCELLED", S.DEADLINE_EXCEEDED: "DEADLINE"}.get(error.code, "?")


@pytest.mark.parametrize(("count", "deadly"), [(900, False), (100, True)])
async def test_random_schedules(
    stub: Any, server: Server, monkeypatch: pytest.MonkeyPatch, count: int, deadly: bool
) -> None:
    monkeypatch.setattr(watch, "GROUP_TIMEOUT_S", 2.0)
    dice = random.Random(20 + deadly)
    schedules = [Schedule(dice, n, deadly=deadly) for n in range(count)]
    tasks = len(asyncio.all_tasks())
    room = asyncio.Semaphore(60)

    async def one(schedule: Schedule) -> str:
        async with room:
            await schedule.run(stub)
        return schedule.action

    actions = await asyncio.gather(*(one(schedule) for schedule in schedules))
    assert set(actions) == set(ACTIONS)
    await freed(server, 5)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 2, 5)
    assert not any(server.engine.budget.statistics().values())
