"""Admission is atomic: whatever goes wrong at whichever step, cancellation included, the engine,
its replicas, its budgets, its timers and the disk are as they were, and the cause comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.artifacts import Artifacts
from omni_grpc.engine import Engine
from omni_grpc.errors import (
    AbortedByClient,
    InternalError,
    InvalidField,
    OmniError,
    QueueFull,
    StageUnavailable,
)
from omni_grpc.orchestrator import AbortOutcome, Orchestrator
from omni_grpc.pool import StagePool
from omni_grpc.replica import Replica
from omni_grpc.run import Run
from omni_grpc.server import Server
from omni_grpc.submission import Submission
from omni_grpc.types import (
    CustomParams,
    Finish,
    FinishReason,
    Prompt,
    Request,
    RequestOptions,
    StageOutput,
    StageParams,
    Text,
    TextDelta,
)
from tests import guided
from tests.guided import listed, made
from tests.running import pipeline, serving
from tests.streaming import new_id
from tests.support import eventually, freed, running

NEGATIVE = listed(("one", "x y", {}), ("two", "y z", {}))
LONG = 3_600_000.0


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """Pipelines with transform and expansion; one of streamed input; one whose bridge breaks."""
    acting = "tests.guided:acting"
    breaking = {"bridge": "tests.faulty:FaultyBridge"}
    configs = [
        guided.guided("group", transform=acting),
        guided.guided("breaking", painter=breaking),
        pipeline("stream", {"name": "words", "output": "text"}, transform=acting),
    ]
    async with serving(*configs, max_requests=3) as served:
        yield served.server


@pytest.fixture
def engine(server: Server) -> Engine:
    """Its engine."""
    return server.engine


class Opened:
    """All runs and artifacts that were opened while it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Run] = []
        open_run = Orchestrator.open

        def noted(self_: Orchestrator, *arguments: Any) -> Run:
            run = open_run(self_, *arguments)
            self.runs.append(run)
            return run

        monkeypatch.setattr(Orchestrator, "open", noted)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """What is opened in this test."""
    return Opened(monkeypatch)


def wish(pipeline: str = "group", text: str = "a ring", **values: Any) -> Request:
    """A request whose transform makes directories, with two companions."""
    resumable = pipeline == "stream"
    information = {"do": values.pop("do", ["make", "own"])}
    prompt = Prompt(Text(text), negative_text=None if resumable else NEGATIVE)
    stage = "words" if resumable else "thinker"
    return Request(
        new_id("atomic"),
        pipeline,
        prompt,
        (StageParams(stage, CustomParams(values)),),
        resumable=resumable,
        options=RequestOptions(additional_information=information, tenant="t"),
    )


async def untouched(server: Server, opened: Opened, tasks: int) -> None:
    """Returns when all is as it was before the requests that were refused."""
    engine = server.engine
    assert len(engine.orchestrator) == 0, "it is still registered"
    assert not any(engine.budget.statistics().values())
    await freed(server, 5)
    root = engine.orchestrator.artifact_root
    await eventually(lambda: not list(root.glob("*")), 5)
    for run in opened.runs:
        assert run.closed and not run.artifacts.directories
        assert not run.watch.timers
        await asyncio.wait_for(run.released(), 5)
    await asyncio.wait_for(engine.orchestrator.idle(), 5)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, 5)


async def works(engine: Engine, request: Request) -> None:
    """Runs a request of the same id to its end."""
    plain = Request(request.request_id, "group", Prompt(Text("a ring")))
    run = await engine.submit(plain)
    events = []
    while (event := await run.next()) is not None:
        events.append(event)
    assert [type(getattr(e, "event", None)).__name__ for e in events][-1] == "Finished"


# ---------------------------------------------------------------- a fault at each step

Fault = Callable[[], BaseException]


def fails(owner: Any, name: str, number: int = 0) -> Callable[[pytest.MonkeyPatch, Fault], None]:
    """Makes call `number` of a method raise."""

    def patch(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
        real, count = getattr(owner, name), [0]

        def wrapped(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == number + 1:
                raise fault()
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)

    return patch


STEPS = {
    "plan": fails(Engine, "plan"),
    "budget": fails(Orchestrator, "open"),
    "the run": fails(Run, "__init__"),
    "artifacts": fails(Artifacts, "__init__"),
    "transform": fails(Submission, "view"),
    "a companion's transform": fails(Submission, "view", 2),
    "expansion": fails(Submission, "companions"),
    "a task": fails(Submission, "task", 1),
    "a place": fails(StagePool, "submit"),
    "submit of the first companion": fails(Replica, "submit", 0),
    "submit of the second companion": fails(Replica, "submit", 1),
    "submit of the parent": fails(Replica, "submit", 2),
    "accepted": fails(Run, "_accepted"),
    "admitted": fails(Run, "stage_admitted"),
    "the group": fails(Run, "group_changed", 1),
}
FAULTS: dict[str, Fault] = {
    "a bug": lambda: ZeroDivisionError("step"),
    "a refusal": lambda: InvalidField("prompt", "step"),
    "a cancellation": lambda: asyncio.CancelledError("step"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
async def test_a_fault_at_any_step_leaves_nothing(
    server: Server, opened: Opened, monkeypatch: pytest.MonkeyPatch, step: str, fault: str
) -> None:
    request, tasks = wish(), len(asyncio.all_tasks())
    with monkeypatch.context() as patched:
        STEPS[step](patched, FAULTS[fault])
        with pytest.raises((ZeroDivisionError, OmniError, asyncio.CancelledError)) as caught:
            await server.engine.submit(request)
    expected: Any = type(FAULTS[fault]())
    if step in ("admitted", "the group") and not issubclass(expected, OmniError):
        # What a replica says is handled apart from the call: the cause is in the log.
        expected = InternalError
    assert caught.type is expected
    await untouched(server, opened, tasks)
    await works(server.engine, request)


@pytest.mark.parametrize("place", ["raise in construction", "leak a cancellation in construction"])
async def test_a_bridge_that_cannot_be_made_leaves_nothing(
    server: Server, opened: Opened, place: str
) -> None:
    tasks = len(asyncio.all_tasks())
    for _ in range(4):  # more often than the server holds requests
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await server.engine.submit(wish("breaking", place))
    await untouched(server, opened, tasks)
    await works(server.engine, wish())


@pytest.mark.parametrize(
    ("request_of", "error"),
    [
        (lambda: wish(prepare_fail=True), InvalidField),
        (lambda: wish(do=["make", "own", "break"]), ZeroDivisionError),
        (lambda: wish("stream", prepare_fail=True), InvalidField),
        (lambda: wish("stream", do=["make", "own", "break"]), ZeroDivisionError),
    ],
    ids=["prepare", "transform", "the first chunks prepare", "the first chunk"],
)
async def test_a_real_refusal_leaves_nothing(
    server: Server, opened: Opened, request_of: Callable[[], Request], error: Any
) -> None:
    request, tasks = request_of(), len(asyncio.all_tasks())
    with pytest.raises(error):
        await server.engine.submit(request)
    assert made(request.request_id)
    await untouched(server, opened, tasks)
    await works(server.engine, request)


# ---------------------------------------------------------------- cancelled anywhere


@pytest.mark.parametrize("kind", ["group", "stream"])
async def test_a_cancel_at_any_turn_leaves_nothing(
    server: Server, opened: Opened, kind: str
) -> None:
    """The call is cancelled after each number of turns of the loop, from none to past its end."""
    tasks, outcomes = len(asyncio.all_tasks()), set()
    for turns in [*range(40), *range(40, 400, 40)]:
        request = wish(kind)
        call = asyncio.create_task(server.engine.submit(request))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        try:
            run = await call
        except asyncio.CancelledError:
            outcomes.add("cancelled")
            assert len(server.engine.orchestrator) == 0
        else:
            outcomes.add("admitted")
            run.close(AbortedByClient("test"))
    assert "cancelled" in outcomes
    await untouched(server, opened, tasks)
    await works(server.engine, request)


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.002, 0.004, 0.008, 0.016])
async def test_a_cancel_at_any_time_leaves_nothing(
    server: Server, opened: Opened, pause: float
) -> None:
    tasks = len(asyncio.all_tasks())
    for number in range(10):
        slow: dict[str, Any] = {"prepare_ms": LONG} if number % 2 else {}
        call = asyncio.create_task(server.engine.submit(wish(**slow)))
        await asyncio.sleep(pause + number * 0.0003)
        call.cancel()
        for run in await asyncio.gather(call, return_exceptions=True):
            if isinstance(run, Run):
                run.close(AbortedByClient("test"))
    await untouched(server, opened, tasks)


async def test_a_cancel_in_prepare_frees_the_stage(server: Server, opened: Opened) -> None:
    request, tasks = wish(prepare_ms=LONG), len(asyncio.all_tasks())
    call = asyncio.create_task(server.engine.submit(request))
    await eventually(lambda: running(server)["thinker"] == 1, 5)  # the companions were quicker
    assert all(path.is_dir() for path in made(request.request_id))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await untouched(server, opened, tasks)


# ---------------------------------------------------------------- limits


async def test_a_full_server_refuses_and_takes_nothing(server: Server, opened: Opened) -> None:
    engine, tasks = server.engine, len(asyncio.all_tasks())
    held = [await engine.submit(wish(first_ms=LONG)) for _ in range(3)]
    for _ in range(5):
        request = wish()
        with pytest.raises(QueueFull):
            await engine.submit(request)
        assert made(request.request_id) == [], "nothing was prepared"
    held[0].close(AbortedByClient("test"))
    held[0] = await engine.submit(wish(first_ms=LONG))
    assert engine.budget.statistics()["requests"] == 3
    for run in held:
        run.close(AbortedByClient("test"))
    await untouched(server, opened, tasks)


async def test_no_replica_refuses_and_takes_nothing(opened: Opened) -> None:
    stage = {"restart": {"backoff": 3600}}
    async with serving(guided.guided("group", stage, transform="tests.guided:acting")) as served:
        tasks = len(asyncio.all_tasks())
        await _die(served.server)
        for _ in range(3):
            with pytest.raises(StageUnavailable):
                await served.server.engine.submit(wish())
        await untouched(served.server, opened, tasks)


async def _die(server: Server) -> None:
    pool = next(pool for pool in server.engine.pools if pool.config.name == "thinker")
    for slot in pool._slots:
        assert slot.replica is not None
        slot.replica.kill()
    await eventually(lambda: not pool.ready_replicas, 5)


# ---------------------------------------------------------------- ends


async def test_late_words_of_an_ended_or_reused_id_are_dropped(
    server: Server, engine: Engine
) -> None:
    """What the old task still says reaches neither the old request nor the new one."""
    first = wish(outputs=50, interval_ms=20.0)
    old = await engine.submit(first)
    await old.next()
    old.close(AbortedByClient("test"))
    new = await engine.submit(Request(first.request_id, "group", Prompt(Text("a ring"))))
    stage = old._graph.entry
    stage.on_output(StageOutput(TextDelta("late")))
    stage.on_output(StageOutput(finish=Finish(FinishReason.STOP)))
    stage.on_ended(None)
    for member in old._graph.group.members:
        member.on_output(StageOutput(TextDelta("late")))
        member.on_ended(None)
    stage.on_lost()
    texts = []
    while (numbered := await new.next()) is not None:
        content = getattr(getattr(numbered, "event", None), "content", None)
        texts += [content.text] if isinstance(content, TextDelta) else []
    assert "late" not in "".join(texts) and texts
    with pytest.raises(AbortedByClient):
        await old.next()
    await freed(server, 5)


async def test_closing_is_idempotent(server: Server, engine: Engine) -> None:
    run = await engine.submit(wish(first_ms=LONG))
    for error in (AbortedByClient("first"), InternalError("second"), None):
        run.close(error)
        engine.orchestrator.close_all(InternalError("all"))
    assert isinstance(run.error, AbortedByClient) and run.error.message == "first"
    with pytest.raises(AbortedByClient):
        await run.next()
    assert engine.budget.statistics()["requests"] == 0, "its share was given back more than once"
    await freed(server, 5)


async def test_abort_answers_when_stages_and_disk_are_free(server: Server, engine: Engine) -> None:
    requests = [wish(first_ms=LONG) for _ in range(3)]
    for request in requests:
        await engine.submit(request)
    paths = [path for request in requests for path in made(request.request_id)]
    assert len(paths) >= 6 and all(path.is_dir() for path in paths)
    assert running(server)["thinker"] >= 3
    outcomes = await engine.abort([request.request_id for request in requests])
    assert outcomes == [AbortOutcome.ABORTED] * 3
    assert not any(running(server).values()), "it answered while stages held tasks"
    assert not any(map(Path.exists, paths)), "it answered while directories were there"


async def test_success_cannot_become_an_error(server: Server, engine: Engine) -> None:
    """Once `finished` is taken, neither an abort nor a deadline comes after it."""
    for late in ("abort", "deadline", "drain"):
        request = Request(new_id(), "group", Prompt(Text("a ring")))
        run = await engine.submit(request)
        while True:
            numbered = await run.next()
            if type(getattr(numbered, "event", None)).__name__ == "Finished":
                break
        if late == "abort":
            outcomes = await engine.abort([request.request_id])
            assert outcomes == [AbortOutcome.ALREADY_FINISHED]
        elif late == "deadline":
            run.watch.expire()
        else:
            engine.orchestrator.close_all(InternalError("all"))
        assert await run.next() is None
    await freed(server, 5)
