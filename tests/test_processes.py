"""Each replica is a process of its own: its devices, threads, variables, log, and its line to the
server."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc import ipc
from omni_grpc.channel import Channel
from omni_grpc.config import load_pipeline
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from tests.running import ServerProcess, alive, family, pipeline, replicas, serving, text_pipeline
from tests.support import (
    ENVIRONMENT,
    ask,
    collect,
    events,
    eventually,
    picture,
    refusal,
    script,
    sound,
    texts,
)

EXAMPLES = "tests.example_stages"


# ---------------------------------------------------------------- what a replica sees


async def test_replicas_see_their_own_devices_only() -> None:
    config = pipeline(
        "devices",
        {"name": "plain", "output": "text"},
        {"name": "two", "inputs": ["plain"], "output": "audio", "replicas": 2}
        | {"engine_args": {"modality": "audio"}, "devices": ["cuda:0", "cuda:1"]},
        {"name": "wide", "inputs": ["plain"], "output": "image"}
        | {"engine_args": {"modality": "image"}, "devices": ["cuda:2,3"]},
    )
    async with serving(config):
        seen = {
            stage: [p.environ()["CUDA_VISIBLE_DEVICES"] for p in replicas("devices", stage)]
            for stage in ("plain", "two", "wide")
        }
    assert seen == {"plain": [""], "two": ["0", "1"], "wide": ["2,3"]}


async def test_stage_sees_its_threads_variables_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_SERVER", "inherited")
    monkeypatch.setenv("OVERRIDDEN", "by the server")
    config = text_pipeline(
        "variables",
        engine="python",
        model=f"{EXAMPLES}:TellEnvironment",
        threads=3,
        environment={**ENVIRONMENT, "OWN": "one = two", "OVERRIDDEN": "by the stage"},
    )
    names = "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS CUDA_VISIBLE_DEVICES"
    async with serving(config) as running:
        prompt = f"{names} FROM_THE_SERVER OVERRIDDEN OWN"
        told = json.loads(texts(await collect(running.omni, ask(prompt))))
    assert told == {
        "replica": 0,
        "device": "cpu",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "FROM_THE_SERVER": "inherited",
        "OVERRIDDEN": "by the stage",
        "OWN": "one = two",
    }


async def test_threads_are_the_libraries_own_choice_unless_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with serving(text_pipeline("unset")):
        (replica,) = replicas("unset", "text")
        assert "OMP_NUM_THREADS" not in replica.environ()


async def test_replica_leads_a_group_of_its_own_and_its_watcher_another() -> None:
    async with serving(text_pipeline("groups")):
        (replica,) = replicas("groups", "text")
        (watcher,) = replica.children()
        groups = {os.getpgid(pid) for pid in (os.getpid(), replica.pid, watcher.pid)}
        assert len(groups) == 3
        assert os.getpgid(replica.pid) == replica.pid
    assert not alive(replica)
    await eventually(lambda: not alive(watcher), 5)


async def test_requests_are_spread_over_replicas() -> None:
    async with serving(text_pipeline("spread", replicas=3)) as running:
        work = script(outputs=1, first_ms=60_000)
        calls = [running.omni.AddRequest(ask(stage_params=[work])) for _ in range(6)]
        for call in calls:
            await call.read()
        answer = await running.omni.GetLoad(service_pb2.GetLoadRequest(), timeout=5)
        assert [replica.running for replica in answer.stages[0].replicas] == [2, 2, 2]
        for call in calls:
            call.cancel()


async def test_pipelines_share_the_processes_of_an_identical_stage() -> None:
    shared = {"name": "shared", "output": "text"}
    own = {"inputs": ["shared"], "output": "audio", "engine_args": {"modality": "audio"}}
    first = pipeline("share-one", shared, {"name": "one", **own})
    second = pipeline("share-two", shared, {"name": "two", **own})
    other = pipeline("share-not", {**shared, "threads": 1})
    before = {process.pid for process in family(os.getpid())}
    async with serving(first, second, other) as running:
        new = [process for process in family(os.getpid()) if process.pid not in before]
        # A replica and a watcher each: shared, one, two, and the stage that differs.
        assert len(new) == 8
        for name in ("share-one", "share-two", "share-not"):
            answer = await collect(running.omni, ask(pipeline=name))
            assert texts(answer) == "hello big world"


# ---------------------------------------------------------------- its log


async def test_what_replicas_print_reaches_the_servers_log() -> None:
    config = text_pipeline(
        "chatty",
        engine="python",
        model=f"{EXAMPLES}:Chatty",
        replicas=2,
        restart={"backoff": 30},
    )
    with ServerProcess(config) as server:
        port = await asyncio.to_thread(server.await_serving)
        for replica in (0, 1):
            for stream in ("stdout", "stderr"):
                assert re.search(rf"INFO \[text/{replica}\] a line on {stream}\n", server.log)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            error = await refusal(service_pb2_grpc.OmniServiceStub(channel), ask("die"))
        assert error.reason == "STAGE_UNAVAILABLE"
        await asyncio.to_thread(server.await_log, r"\[text/0\] last words\n", 5)
        await asyncio.to_thread(server.await_log, r"\[text/0\] and no newline\n", 5)
        await asyncio.to_thread(server.await_log, r"replica text/0 exited with 3", 5)


# ---------------------------------------------------------------- the line to the server


def is_there(path: Path) -> bool:
    """Whether it exists."""
    return path.exists()


async def test_tcp_does_what_unix_sockets_do() -> None:
    answers = []
    for address in ("ipc", "tcp://127.0.0.1"):
        before = {process.pid for process in family(os.getpid())}
        async with serving(load_pipeline("echo"), ipc=address) as running:
            new = [process for process in family(os.getpid()) if process.pid not in before]
            lines = {process.info["cmdline"][-1] for process in new}
            assert len(lines) == 3
            scheme = r"ipc:///.*" if address == "ipc" else r"tcp://127\.0\.0\.1:\d+"
            assert all(re.fullmatch(scheme, line) for line in lines)
            answer = await collect(running.omni)
            answers.append((texts(answer), sound(answer), picture(answer), set(events(answer))))
            call = running.omni.AddRequest(ask(stage_params=[script(outputs=1, first_ms=60_000)]))
            await call.read()
            call.cancel()
            await eventually(lambda: not running.server.engine.orchestrator.statistics(), 5)
    assert answers[0] == answers[1]
    assert answers[0][0] == "hello big world"


async def test_outputs_of_one_turn_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[Any]] = []
    receive = Channel.receive

    async def counted(self: Channel[Any, Any]) -> list[Any]:
        messages = await receive(self)
        if said := [one for one in messages if isinstance(one, ipc.Emitted | ipc.Spoken)]:
            batches.append(said)
        return messages

    monkeypatch.setattr(Channel, "receive", counted)
    config = text_pipeline("burst", engine="python", model=f"{EXAMPLES}:Burst")
    async with serving(config) as running:
        answer = await collect(running.omni, stage_params=[script(outputs=100)])
    assert texts(answer).split() == [str(number) for number in range(100)]
    # The hundred in columns, each by itself, and what says why they ended.
    ((*words, end),) = batches
    said = [text for one in words for text in one.texts]
    assert "".join(said) == texts(answer)
    assert len(said) == 100
    assert end.output.finish is not None


async def test_restarts_leave_no_descriptor_and_no_socket() -> None:
    config = text_pipeline("again", restart={"backoff": 0.05, "budget": 10})
    async with serving(config) as running:
        pool, server = running.server.engine.pools[0], psutil.Process()

        async def restart() -> None:
            (replica,) = replicas("again", "text")
            socket = Path(replica.info["cmdline"][-1].removeprefix("ipc://"))
            assert is_there(socket)
            replica.kill()
            await eventually(lambda: not pool.ready_replicas, 5)
            await eventually(lambda: pool.ready_replicas, 10)
            assert not is_there(socket)

        await restart()
        before = server.num_fds()
        for _ in range(4):
            await restart()
        assert server.num_fds() <= before
        assert pool.statistics()[0].restarts == 5
        assert (await collect(running.omni))[-1].HasField("finished")
