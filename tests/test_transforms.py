"""Prompt transforms: what they see, what becomes of what they make, and that later stages see the
client's own prompt. Directories that they make go with their request, whatever its end."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from omni_grpc import run as run_module
from omni_grpc import submission
from omni_grpc.artifacts import Artifacts
from omni_grpc.server import Server
from omni_grpc.types import Text
from omni_grpc.v1 import service_pb2
from tests import guided
from tests.conftest import Serve
from tests.guided import CALLS, GATE, SECRET, calls, drawn, listed, made, thinking
from tests.running import pipeline, serving
from tests.streaming import Feeding, chunk, feed, new_id, opened, refused
from tests.support import (
    TEXT,
    ask,
    broken_off,
    client,
    collect,
    events,
    eventually,
    freed,
    refusal,
    script,
    stub_of,
    texts,
)

S = grpc.StatusCode
LONG = 3_600_000
ACTING = "tests.guided:acting"


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """`acting`, `plain` (no transform) and `pair` (companions) over the same stages; `stream`."""
    configs = [
        guided.guided("acting", painter={"bridge": "tests.guided:Original"}, transform=ACTING),
        guided.guided("plain"),
        guided.guided("pair", transform=ACTING),
        pipeline("stream", {"name": "words", "output": "text"}, transform=ACTING),
    ]
    async with serving(*configs) as running:
        yield running.server


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    """A client of it. When the test is over, nothing is left."""
    async with client(server) as channel:
        yield stub_of(channel)
    GATE.set()
    await freed(server, 5)
    await eventually(lambda: not left(server), 5)


@pytest.fixture
def gate() -> Iterator[None]:
    """A gate that is shut, and open again when the test is over."""
    GATE.clear()
    yield
    GATE.set()


def left(server: Server) -> list[Path]:
    """Artifact directories that are there."""
    return list(server.engine.orchestrator.artifact_root.glob("*"))


def do(*deeds: str, **fields: Any) -> dict[str, Any]:
    """Fields of a request whose transform does this."""
    information = {"do": list(deeds), **fields.pop("information", {})}
    return {"request_id": new_id("acts"), "additional_information": information, **fields}


# ---------------------------------------------------------------- what it sees, what others see


async def test_it_is_called_once_in_a_thread_with_prompt_and_parameters(stub: Any) -> None:
    fields = do(stage_params=thinking(first_ms=1), information={"mine": [1, {"a": 2}]})
    await collect(stub, pipeline="acting", **fields)
    (call,) = calls(fields["request_id"])
    assert call.prompt.content == Text("hello big world")
    assert call.information["mine"] == [1, {"a": 2}]
    assert call.thread != "MainThread"


async def test_a_slow_one_holds_up_nobody_else(stub: Any) -> None:
    slow = asyncio.create_task(collect(stub, pipeline="acting", **do("block")))
    await eventually(lambda: CALLS and CALLS[-1].information.get("do") == ["block"], 5)
    loop, gaps = asyncio.get_running_loop(), []
    while not slow.done():
        before = loop.time()
        await asyncio.sleep(0.001)
        gaps.append(loop.time() - before)
    assert max(gaps) < 0.4, "the event loop stood still"
    assert (await slow)[-1].finished.timings.transform_ms >= 490


@pytest.mark.parametrize("deed", ["mutate", "anew"])
async def test_later_stages_see_the_clients_prompt(stub: Any, deed: str) -> None:
    nested = {"nested": {"list": [1.0]}}
    prompt = {"token_ids": {"ids": [5, 6]}, "negative_text": listed()}
    responses = await collect(
        stub,
        service_pb2.AddRequestRequest(
            prompt=prompt, pipeline="acting", **do(deed, information=nested)
        ),
    )
    (said, _) = json.loads(drawn(responses)[0])
    assert said == [5, 6]
    task = json.loads(texts(responses))
    assert task["said"] == ([5, 6, 4711] if deed == "mutate" else "all new")
    # It changed its own copies of parameters and information only.
    assert task["params"] == {}
    assert task["information"]["nested"] == nested["nested"]
    assert "more" not in task["information"]


async def test_what_one_changes_is_not_seen_by_the_next_request(serve: Serve) -> None:
    """The pipeline's defaults are shared by all requests."""
    config = guided.guided("defaults", {"defaults": {"outputs": 2}}, transform=ACTING)
    served = await serve(config)
    nested: dict[str, Any] = {"nested": {"list": []}}
    for deed in ("mutate", "make", "mutate", "make"):
        fields = do(deed, information=nested, output_modalities=[TEXT])
        assert texts(await collect(served.stub, **fields)) == "word0 word1 "


@pytest.mark.parametrize("deed", [None, "make", "mutate", "anew"])
async def test_the_request_id_is_there_before_and_after(stub: Any, deed: str | None) -> None:
    information = {"nested": {"list": []}, "global_request_id": "forged"}
    fields = do(*[deed] if deed else [], information=information)
    told = json.loads(texts(await collect(stub, pipeline="acting", **fields)))
    (call,) = calls(fields["request_id"])
    assert call.information["global_request_id"] == fields["request_id"]
    assert told["information"]["global_request_id"] == fields["request_id"]
    assert told["information"].get("caption") == ("a ring" if deed == "anew" else None)


async def test_without_a_transform_the_id_is_there_too(stub: Any) -> None:
    information = {"global_request_id": "forged", "mine": "x"}
    responses = await collect(
        stub, pipeline="plain", request_id="no-transform", additional_information=information
    )
    expected = {"global_request_id": "no-transform", "mine": "x"}
    assert json.loads(texts(responses))["information"] == expected


async def test_companions_have_ids_of_their_own(stub: Any) -> None:
    fields = do("anew")
    prompt = {"text": "a ring", "negative_text": listed(("negative", "dull", {}))}
    request = service_pb2.AddRequestRequest(prompt=prompt, pipeline="pair", **fields)
    parent, ((_, companion),) = drawn(await collect(stub, request))
    own = f"{fields['request_id']}#negative-0"
    ids = [json.loads(one)["information"]["global_request_id"] for one in (parent, companion)]
    assert ids == [fields["request_id"], own]
    assert json.loads(companion)["said"] == "all new", "its prompt was transformed too"
    (call,) = calls(own)
    assert call.information["global_request_id"] == own
    assert call.prompt.content == Text("dull")


@pytest.mark.parametrize("pipeline", ["acting", "plain"])
async def test_keys_of_the_server_are_stripped(stub: Any, tmp_path: Path, pipeline: str) -> None:
    (tmp_path / "precious").write_text("keep me")
    paths = [str(tmp_path), "/etc", "../.."]
    information = {"artifact_directories": paths, "transform": {"x": 1}, "mine": 1}
    fields = do(information=information)
    told = json.loads(texts(await collect(stub, pipeline=pipeline, **fields)))
    assert told["information"].keys() == {"do", "mine", "global_request_id"}
    assert (tmp_path / "precious").exists() and os.path.exists("/etc/passwd")  # noqa: ASYNC240


async def test_a_diffusion_stage_takes_its_prompt_as_it_is(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transform, no id, no preprocessing to tell of."""
    for module in (submission, run_module):
        monkeypatch.setattr(module, "DIFFUSION", ("python",))
    information = {"mine": 1, "artifact_directories": ["/etc"], "do": ["break"]}
    prompt = {"text": "a ring", "negative_text": listed(("negative", "dull", {}))}
    request = service_pb2.AddRequestRequest(
        prompt=prompt,
        pipeline="pair",
        request_id="as-it-is",
        additional_information=information,
        stage_params=thinking(prepare_ms=300),
    )
    responses = await collect(stub, request)
    parent, ((_, companion),) = drawn(responses)
    for one in (parent, companion):
        assert json.loads(one)["information"] == {"mine": 1, "do": ["break"]}
    timings = responses[-1].finished.timings
    assert timings.preprocess_ms == timings.transform_ms == 0
    assert timings.queue_wait_ms < 280, "preparing is not waiting"
    assert calls("as-it-is") == calls("as-it-is#negative-0") == []


# ---------------------------------------------------------------- results that are none

GARBAGE = (
    "nothing",
    "a prompt",
    "text as a prompt",
    "a number as text",
    "an object",
    "half a surrogate pair",
    "a list",
)


@pytest.mark.parametrize("what", GARBAGE)
async def test_a_bad_result_fails_its_own_request_only(stub: Any, what: str) -> None:
    """And not the replica that would have to read it."""
    other = asyncio.create_task(
        collect(stub, pipeline="plain", stage_params=thinking(outputs=20, interval_ms=10))
    )
    fields = do("make", "own", f"give={what}")
    responses, error = await broken_off(stub, pipeline="acting", timeout=5, **fields)
    assert (responses, error.code, error.reason) == ([], S.INTERNAL, "INTERNAL")
    assert events(await other)[-1] == "finished"
    await gone(made(fields["request_id"]))


# ---------------------------------------------------------------- directories, at every ending

DEEDS = ("make", "own")


async def acted(request_id: str) -> list[Path]:
    """The directories of a request, once they are made."""
    await eventually(lambda: len(made(request_id)) >= 2, 10)
    return made(request_id)


async def gone(paths: list[Path]) -> None:
    """Returns when none of the directories is there."""
    assert len(paths) >= 2
    await eventually(lambda: not any(path.exists() for path in paths), 5)


async def running(server: Server, request_id: str) -> list[Path]:
    """Its directories, once a stage holds the request and it has been admitted."""
    paths = await acted(request_id)
    run = server.engine.orchestrator.find(request_id)
    await eventually(lambda: run._admission.done(), 10)
    assert all(path.is_dir() for path in paths)
    assert set(paths) <= set(run.artifacts.directories)
    return paths


@pytest.mark.parametrize(
    ("params", "deeds", "reason"),
    [
        (thinking(prepare_fail=True), DEEDS, "INVALID_FIELD"),
        ([], (*DEEDS, "break"), "INTERNAL"),
        (thinking(fail_at=0), DEEDS, "STAGE_ERROR"),
        ([script("painter", fail_at=0)], DEEDS, "STAGE_ERROR"),
    ],
    ids=["refused", "the transform raises", "error", "a later error"],
)
async def test_what_fails_deletes_them(stub: Any, params: Any, deeds: Any, reason: str) -> None:
    fields = do(*deeds, stage_params=params)
    error = await refusal(stub, pipeline="acting", **fields)
    assert error.reason == reason and SECRET not in error.message
    await gone(made(fields["request_id"]))


async def test_finishing_deletes_them(stub: Any) -> None:
    fields = do(*DEEDS)
    assert events(await collect(stub, pipeline="acting", **fields))[-1] == "finished"
    await gone(made(fields["request_id"]))


@pytest.mark.parametrize("negative", ["break", "break late", listed(("n", "x", {"wrong": 1}))])
async def test_companions_that_fail_delete_them(stub: Any, negative: str) -> None:
    prompt = {"text": "a ring", "negative_text": negative}
    fields = do(*DEEDS)
    request = service_pb2.AddRequestRequest(prompt=prompt, pipeline="pair", **fields)
    assert (await refusal(stub, request)).reason == "INTERNAL"
    await gone(made(fields["request_id"]))


async def test_a_stage_without_replicas_refuses_before_anything_is_made(serve: Serve) -> None:
    config = guided.guided("empty", {"restart": {"backoff": 3600}}, transform=ACTING)
    served = await serve(config)
    await refusal(served.stub, stage_params=thinking(die_at=0))
    fields = do(*DEEDS)
    assert (await refusal(served.stub, **fields)).reason == "STAGE_UNAVAILABLE"
    assert made(fields["request_id"]) == []


@pytest.mark.parametrize("how", ["abort", "cancel", "deadline", "death"])
@pytest.mark.parametrize("admitted", [True, False])
async def test_leaving_deletes_them(stub: Any, server: Server, how: str, admitted: bool) -> None:
    """While it runs, and while a stage prepares it."""
    kind = "hang_at" if admitted else "prepare_ms"
    values = {kind: 0 if admitted else LONG}
    if how == "death":
        values = {"die_at": 0, "first_ms": 300} if admitted else {"die_at": 0}
    fields = do(*DEEDS, stage_params=thinking(**values))
    timeout = 0.5 if how == "deadline" else 20
    call = stub.AddRequest(ask(pipeline="acting", **fields), timeout=timeout)
    reading = asyncio.create_task(_code(call))
    await acted(fields["request_id"])
    if how == "abort":
        answer = await stub.Abort(service_pb2.AbortRequest(request_ids=[fields["request_id"]]))
        assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
        # It answers when all is freed, directories included.
        assert not any(path.exists() for path in made(fields["request_id"]))
    elif how == "cancel":
        call.cancel()
    codes = {"abort": S.CANCELLED, "cancel": S.CANCELLED, "deadline": S.DEADLINE_EXCEEDED}
    assert await reading is codes.get(how, S.UNAVAILABLE)
    await gone(made(fields["request_id"]))
    await eventually(lambda: all(pool.ready_replicas for pool in server.engine.pools), 10)


async def _code(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("how", ["abort", "cancel", "deadline", "the pipelines longest"])
async def test_leaving_while_it_transforms(
    stub: Any, server: Server, gate: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The client hears at once, nothing is submitted; what the thread still makes goes when it
    has ended."""
    fields = do(*DEEDS, "wait", *DEEDS)
    timeout = 0.4 if how == "deadline" else 20
    call = stub.AddRequest(ask(pipeline="acting", **fields), timeout=timeout)
    reading = asyncio.create_task(_code(call))
    await acted(fields["request_id"])
    run = server.engine.orchestrator.find(fields["request_id"])
    aborting = None
    if how == "abort":
        request = service_pb2.AbortRequest(request_ids=[fields["request_id"]])
        aborting = asyncio.create_task(_awaited(stub.Abort(request)))
    elif how == "cancel":
        call.cancel()
    elif how == "the pipelines longest":
        run.watch.expire()
    async with asyncio.timeout(3):
        code = await reading
    assert code in (S.CANCELLED, S.DEADLINE_EXCEEDED)
    await freed(server, 3, "artifact directory")
    assert aborting is None or not aborting.done(), "its directories are still in use"
    GATE.set()
    await gone(made(fields["request_id"]))
    if aborting is not None:
        await aborting
    # Late makings were refused, or deleted as well.
    await asyncio.wait_for(run.released(), 5)
    await eventually(lambda: not left(server), 5)
    assert run._graph.entry.handle is None, "a request that had ended was submitted"


async def _awaited(call: Any) -> Any:
    return await call


async def test_an_id_can_be_used_while_its_old_transform_goes_on(stub: Any, gate: None) -> None:
    fields = do("make", "wait")
    call = stub.AddRequest(ask(pipeline="acting", **fields))
    reading = asyncio.create_task(_code(call))
    await eventually(lambda: made(fields["request_id"]), 5)
    (old,) = made(fields["request_id"])
    call.cancel()
    assert await reading is S.CANCELLED
    again = fields | {"additional_information": {"do": ["make"]}}
    again["stage_params"] = thinking(outputs=3, hang_at=1)
    second = stub.AddRequest(ask(pipeline="acting", **again))
    async for response in second:
        if response.WhichOneof("event") == "output":
            break
    new = next(path for path in made(fields["request_id"]) if path != old)
    GATE.set()
    await eventually(lambda: not old.exists(), 5)
    assert new.is_dir(), "the new request's directory went with the old one's"
    second.cancel()
    await eventually(lambda: not new.exists(), 5)


@pytest.mark.parametrize("live", [True, False])
async def test_stopping_deletes_them(live: bool, gate: None) -> None:
    """Of requests that run, and of those that are still transformed."""
    async with serving(guided.guided("stopping", transform=ACTING)) as served:
        fields = do(*DEEDS, *([] if live else ["wait"]), stage_params=thinking(hang_at=0))
        call = served.omni.AddRequest(ask(**fields))
        reading = asyncio.create_task(_code(call))
        paths = await (running(served.server, fields["request_id"]) if live else acted_(fields))
        root = served.server.engine.orchestrator.artifact_root
        stopping = asyncio.create_task(served.stop(0.1))
        assert await reading is S.UNAVAILABLE
        await stopping
        assert not root.exists() and not root.parent.exists()
        GATE.set()
        await gone(paths)


async def acted_(fields: dict[str, Any]) -> list[Path]:
    """As `acted`, from a request's fields."""
    return await acted(fields["request_id"])


# ---------------------------------------------------------------- directories that are not ours


def outside(root: Path, tmp_path: Path, kind: str) -> str:
    """A path of that kind, to be claimed below the artifact root."""
    if kind == "absolute":
        return str(tmp_path)
    if kind == "dots":
        return os.path.relpath(tmp_path, root)
    if kind == "the root":
        return "."
    if kind == "the root's parent":
        return ".."
    link = root / "link"
    root.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path if kind == "a link" else tmp_path.parent)
    return "link" if kind == "a link" else f"link/{tmp_path.name}"


@pytest.mark.parametrize(
    "kind",
    [
        "absolute",
        "dots",
        "the root",
        "the root's parent",
        "a link",
        "through a link",
        "another's",
        "another's folder",
    ],
)
async def test_what_is_not_below_the_root_is_refused_and_stays(
    stub: Any, server: Server, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "precious").write_text("keep me")
    root = server.engine.orchestrator.artifact_root
    # Another request's directory is below the root too.
    bystander = do("make", stage_params=thinking(hang_at=0))
    other = stub.AddRequest(ask(pipeline="acting", **bystander))
    reading = asyncio.create_task(_code(other))
    await eventually(lambda: made(bystander["request_id"]), 5)
    path = outside(root, tmp_path, kind)
    if kind.startswith("another"):
        path = str(made(bystander["request_id"])[0])
        path = os.path.dirname(path) if kind == "another's folder" else path
    fields = do(*DEEDS, f"claim={path}")
    error = await refusal(stub, pipeline="acting", **fields)
    assert (error.code, error.reason) == (S.INTERNAL, "INTERNAL")
    assert str(tmp_path) not in error.message
    # What was claimed beside it is ours, and goes.
    await gone(made(fields["request_id"]))
    assert (tmp_path / "precious").read_text() == "keep me"
    assert made(bystander["request_id"])[0].is_dir()
    (root / "link").unlink(missing_ok=True)
    other.cancel()
    await reading


async def test_a_link_in_a_directory_is_not_followed(stub: Any, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    fields = do("make", stage_params=thinking(outputs=3, hang_at=1))
    call = stub.AddRequest(ask(pipeline="acting", **fields))
    reading = asyncio.create_task(_code(call))
    await eventually(lambda: made(fields["request_id"]), 5)
    (directory,) = made(fields["request_id"])
    (directory / "link").symlink_to(tmp_path)
    call.cancel()
    await reading
    await eventually(lambda: not directory.exists(), 5)
    assert (tmp_path / "precious").read_text() == "keep me"


# ---------------------------------------------------------------- streamed input


async def test_prompts_of_chunks_are_transformed(stub: Any) -> None:
    async with opened(stub, new_id(), pipeline="stream", prompt={"text": "anew"}) as request:
        chunks = [chunk(0, prompt={"text": "anew"}), chunk(1, " mine "), chunk(2, "anew")]
        await feed(stub, request.id, chunks)
        await request.finished()
        assert request.text == "all newall new mine anew"
        assert [call.prompt.content for call in calls(request.id)] == [Text("anew")] * 2
        assert {call.information["global_request_id"] for call in calls(request.id)} == {request.id}


@pytest.mark.parametrize("bad", ["make, own, break", "make, own, claim"])
async def test_a_bad_chunk_deletes_only_its_own(stub: Any, server: Server, bad: str) -> None:
    async with opened(stub, new_id(), pipeline="stream", prompt={"text": "make, own"}) as request:
        kept = made(request.id)
        feeding = await Feeding(stub, request.id).send(chunk(0, prompt={"text": "make, own"}))
        await eventually(lambda: len(calls(request.id)) == 2, 5)
        feeding.cancel()
        await eventually(lambda: not _lane(server, request.id).fed, 5)
        kept += calls(request.id)[1].made if _lane(server, request.id).next_seq else []
        number = _lane(server, request.id).next_seq
        error = await refused(stub, request.id, chunk(number, prompt={"text": bad}))
        assert error.reason == "INTERNAL"
        await gone(calls(request.id)[-1].made)
        assert all(path.is_dir() for path in kept)
        await feed(stub, request.id, [chunk(number, "the end")])
        await request.finished()
    await eventually(lambda: not any(path.exists() for path in kept), 5)


def _lane(server: Server, request_id: str) -> Any:
    return server.engine.orchestrator.find(request_id).lane


async def test_a_bad_chunk_that_names_a_live_directory_deletes_it_not(stub: Any) -> None:
    async with opened(stub, new_id(), pipeline="stream", prompt={"text": "make, own"}) as request:
        error = await refused(stub, request.id, chunk(0, prompt={"text": "again, claim"}))
        assert error.reason == "INTERNAL"
        # It tells the request's own directories again, then fails.
        await asyncio.sleep(0.1)
        assert all(path.is_dir() for path in made(request.id))
        await feed(stub, request.id, [chunk(0, "the end")])
        await request.finished()


async def test_a_feeder_that_leaves_while_its_chunk_is_transformed(
    stub: Any, server: Server, gate: None
) -> None:
    async with opened(stub, new_id(), pipeline="stream", prompt={"text": "make, own"}) as request:
        kept = made(request.id)
        text = "make, own, wait"
        feeding = await Feeding(stub, request.id).send(chunk(0, prompt={"text": text}))
        await eventually(lambda: len(made(request.id)) == 4, 5)
        feeding.cancel()
        await eventually(lambda: not _lane(server, request.id).fed, 5)
        await feed(stub, request.id, [chunk(0, "instead")])
        GATE.set()
        await eventually(lambda: not any(p.exists() for p in made(request.id)[2:]), 5)
        responses = await request.finished()
        assert texts(responses) == "make, owninstead"
    await eventually(lambda: not any(path.exists() for path in kept), 5)


# ---------------------------------------------------------------- the directories by themselves


async def test_a_directory_made_after_the_end_is_refused_or_deleted(tmp_path: Path) -> None:
    """From many threads, while the end comes."""
    for _ in range(20):
        artifacts = Artifacts(tmp_path / "root")
        threads = [asyncio.to_thread(_make_some, artifacts) for _ in range(4)]
        making = asyncio.gather(*threads)
        await asyncio.sleep(0.001)
        artifacts.delete()
        artifacts.delete()
        await making
        await asyncio.wait_for(artifacts.deleted(), 5)
        assert not list((tmp_path / "root").glob("*")) and not artifacts.directories


def _make_some(artifacts: Artifacts) -> None:
    def work() -> None:
        for _ in range(50):
            artifacts.make_directory()
            artifacts.adopt([Path(tempfile.mkdtemp(dir=artifacts._root))])

    try:
        artifacts.use(work)
    except RuntimeError as error:
        assert "has ended" in str(error)


async def test_deleting_is_quiet_about_what_is_gone(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "root")
    first, second = artifacts.make_directory(), artifacts.make_directory()
    first.rmdir()
    artifacts.delete()
    await asyncio.wait_for(artifacts.deleted(), 5)
    assert not second.exists() and (tmp_path / "root").is_dir()
    part = artifacts.part()
    with pytest.raises(RuntimeError):
        part.make_directory()
