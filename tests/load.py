"""A client under load, as a process of its own: `python -m tests.load PORT KIND…`.

Calls of these kinds go on until its standard input ends; those that run then are finished, and what
came of all is printed as JSON. An answer that is not right is a failure like any other."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from omni_grpc.v1 import service_pb2
from tests.balanced import channel, hashed, where
from tests.running import health_stub
from tests.sessions import Session
from tests.streaming import Update, chunk, header, new_id
from tests.support import ROOT, Response, ask, events, rich_error, script, stub_of, texts

CHANNELS = 4
WORKERS = {"short": 6, "long": 6, "session": 8, "fed": 4, "aborted": 2, "info": 2, "health": 2}
"""How many callers of each kind."""
PAUSE_S = 0.05
LONG = 15
LONG_MS = 100
SEGMENTS = 40


@dataclass(frozen=True)
class Failure:
    """A call that failed. `code` WRONG: by its content; `begun`: its initial metadata had come."""

    kind: str
    code: str
    reason: str
    message: str
    begun: bool


@dataclass
class Report:
    """What came of all calls. By kind: how many were right, and the slowest one's seconds."""

    done: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    pods: list[str] = field(default_factory=list)
    told_to_go: int = 0
    """Sessions that heard `going_away`, and finished."""

    @staticmethod
    def parse(text: str) -> Report:
        """Of the JSON that the process prints."""
        content = json.loads(text)
        failures = [Failure(**failure) for failure in content.pop("failures")]
        return Report(failures=failures, **content)


class Load:
    """The process, while the `with` lasts; then its report."""

    def __init__(self, port: int, *kinds: str) -> None:
        self.report = Report()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.load", str(port), *(kinds or WORKERS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        # It calls from now on.
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "calling\n"

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            printed, _ = self._process.communicate(timeout=25)
        finally:
            self._process.kill()
            self._process.wait(5)
        if error is None:
            assert self._process.returncode == 0
            self.report = Report.parse(printed)


class Caller:
    """The calls. Each kind is a method that is given a list for the responses that it has."""

    def __init__(self, port: int) -> None:
        self._channels = [channel(port) for _ in range(CHANNELS)]
        self._next = itertools.cycle(self._channels)
        self._stopping = asyncio.Event()
        self.report = Report()

    async def run(self, kinds: list[str]) -> None:
        """Calls until standard input ends."""
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                for _ in range(WORKERS[kind]):
                    group.create_task(self._repeat(kind))
            await asyncio.to_thread(sys.stdin.read)
            self._stopping.set()
        for one in self._channels:
            await one.close()

    async def _repeat(self, kind: str) -> None:
        report = self.report
        while not self._stopping.is_set():
            began, got = time.monotonic(), list[Response]()
            try:
                await getattr(self, kind)(got)
                report.done[kind] = report.done.get(kind, 0) + 1
            except grpc.aio.AioRpcError as error:
                rich = rich_error(error)
                code, reason, message = rich.code.name, rich.reason, rich.message
                begun = "omni-pod" in dict(error.initial_metadata() or ())
                report.failures.append(Failure(kind, code, reason, message, begun))
            except (AssertionError, asyncio.InvalidStateError) as error:
                report.failures.append(Failure(kind, "WRONG", "", repr(error), bool(got)))
            elapsed = round(time.monotonic() - began, 2)
            report.slowest[kind] = max(report.slowest.get(kind, 0), elapsed)
            await asyncio.sleep(PAUSE_S)

    @property
    def _stub(self) -> Any:
        return stub_of(next(self._next))

    # ------------------------------------------------------------ kinds of calls

    async def short(self, got: list[Response]) -> None:
        """An echo."""
        text = new_id("one two three")
        await rest(self._stub.AddRequest(ask(text), timeout=20), got)
        check_whole(got)
        assert texts(got) == text, texts(got)

    async def long(self, got: list[Response]) -> None:
        """A stream that takes its time."""
        work = script(outputs=LONG, interval_ms=LONG_MS)
        await rest(self._stub.AddRequest(ask(stage_params=[work]), timeout=20), got)
        check_whole(got)
        assert len(texts(got).split()) == LONG, texts(got)

    async def info(self, got: list[Response]) -> None:
        """Who is there."""
        answer = await self._stub.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=10)
        self.report.pods = sorted({*self.report.pods, answer.pod})

    async def health(self, got: list[Response]) -> None:
        """Answered is enough: a server that drains says NOT_SERVING."""
        stub = health_stub(next(self._next))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)

    async def fed(self, got: list[Response]) -> None:
        """A request whose input comes by a call of its own, over another connection."""
        request_id, words = new_id("fed"), ["one ", "two ", "three"]
        opening = service_pb2.AddRequestRequest(request_id=request_id, resumable=True)
        call = self._stub.AddRequest(opening, timeout=20, metadata=hashed(request_id))
        got.append(await call.read())
        reading = asyncio.create_task(rest(call, got))
        feeding = self._stub.StreamingUpdate(timeout=20, metadata=await where(call, request_id))
        try:
            await feeding.write(header(request_id))
            for seq, word in enumerate(words):
                await feeding.write(Update(chunk=chunk(seq, word)))
                await asyncio.sleep(0.1)
            await feeding.done_writing()
            assert (await feeding).accepted_chunks == len(words)
        finally:
            await reading
        check_whole(got)
        assert texts(got) == "".join(words), texts(got)

    async def aborted(self, got: list[Response]) -> None:
        """A request that is aborted by a call of its own, over another connection."""
        request_id = new_id("aborted")
        work = script(outputs=1000, interval_ms=50)
        request = ask(request_id=request_id, stage_params=[work])
        call = self._stub.AddRequest(request, timeout=20, metadata=hashed(request_id))
        got.append(await call.read())
        abort = service_pb2.AbortRequest(request_ids=[request_id])
        metadata = await where(call, request_id)
        answer = await self._stub.Abort(abort, timeout=10, metadata=metadata)
        outcome = answer.results[0].outcome
        assert outcome == service_pb2.AbortResponse.OUTCOME_ABORTED, outcome
        try:
            await rest(call, got)
        except grpc.aio.AioRpcError as error:
            if rich_error(error).reason != "ABORTED_BY_CLIENT":
                raise

    async def session(self, got: list[Response]) -> None:
        """A session of many segments. One that hears `going_away` ends with the next."""
        opening = {"request_id": new_id("session"), "resumable": True}
        one = await Session(self._stub, timeout=20, open=opening).begin()
        said = ""
        for seq in range(SEGMENTS):
            told = any(message.HasField("going_away") for message in one.heard)
            await one.update(seq, f"word {seq} ", end=True)
            said += f"word {seq} "
            await one.until(lambda s: answered(s) > seq)  # noqa: B023 - awaited here
            self.report.told_to_go += told
            if told or self._stopping.is_set():
                break
            await asyncio.sleep(0.1)
        await one.half_close()
        await one.finished()
        assert one.text == said, one.text


async def rest(call: Any, got: list[Response]) -> None:
    """Reads to the end. Raises the call's error."""
    while (response := await call.read()) is not grpc.aio.EOF:
        got.append(response)
    if await call.code() is not grpc.StatusCode.OK:
        await call.read()  # raises it


def check_whole(responses: list[Response]) -> None:
    """`accepted` first, `finished` last, no gap."""
    assert [response.seq for response in responses] == list(range(len(responses)))
    kinds = events(responses)
    assert (kinds[0], kinds[-1]) == ("accepted", "finished"), kinds


def answered(one: Session) -> int:
    """How many segments the session has had an answer to."""
    return sum(response.WhichOneof("event") == "segment_end" for response in one.responses)


async def main() -> None:
    """The process."""
    # Here, not outside: channels belong to the running loop.
    caller = Caller(int(sys.argv[1]))
    print("calling", flush=True)
    await caller.run(sys.argv[2:])
    json.dump(asdict(caller.report), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
