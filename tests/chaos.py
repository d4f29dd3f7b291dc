"""A crowd of clients that send requests of all kinds, and a tormentor that kills, stops and slows
replicas. Each client checks each end: the right status, or the right answer byte for byte."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import grpc
import psutil

from omni_grpc.stages.fake import split_words, tone
from omni_grpc.v1 import params_pb2, service_pb2
from tests.streaming import Chunk, Update, header, new_id
from tests.support import Response, ask, rich_error, script, sound, texts

Interaction = service_pb2.SubmitInteractionRequest

LOST = {("UNAVAILABLE", "STAGE_UNAVAILABLE"), ("ABORTED", "REPLICA_LOST")}
FAILED = ("INTERNAL", "STAGE_ERROR")
OWN = "Internal error from Core"
"""What grpcio's asyncio client says of a stream that the server ends while the client writes,
whatever the server's status is."""
KINDS = ("plain", "plain", "slow", "cancel", "stall", "fail", "text", "fed", "session")
SCRIPTS: dict[str, list[params_pb2.StageParams]] = {
    "slow": [script("first", first_ms=30), script("second", interval_ms=5)],
    "stall": [script("first", interval_ms=10)],
    "fail": [script("second", fail_at=1)],
}


class Client:
    """Sends one request after another, of random kinds and sizes, to the pipeline `four`."""

    def __init__(self, stub: Any, seed: int) -> None:
        self._stub = stub
        self._random = random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        """Requests until that moment of the loop's clock."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await self.one(self._random.choice(KINDS))

    async def one(self, kind: str) -> None:
        """One request; AssertionError if it does not end as it may."""
        words = "".join(
            f"{self._random.randrange(1000)} " for _ in range(self._random.randint(1, 9))
        )
        match kind:
            case "cancel":
                await self._cancel(words)
            case "session":
                await self._read(kind, words, self._session(words))
            case "fed":
                await self._fed(words)
            case _:
                await self._read(kind, words, self._request(kind, words))

    def _request(self, kind: str, words: str) -> Any:
        outputs = [1] if kind == "text" else []
        request = ask(
            words, pipeline="four", stage_params=SCRIPTS.get(kind), output_modalities=outputs
        )
        return self._stub.AddRequest(request, timeout=30)

    async def _read(self, kind: str, words: str, call: Any) -> None:
        """Reads a stream to its end, and checks it."""
        responses: list[Response] = []
        try:
            async for message in call:
                if isinstance(message, Response):
                    responses.append(message)
                elif message.HasField("response"):
                    responses.append(message.response)
                if kind == "stall":
                    await asyncio.sleep(self._random.random() / 50)
        except grpc.aio.AioRpcError as error:
            self._failed(kind, words, error)
            return
        assert kind != "fail" or len(list(split_words(words))) < 1, "it was scripted to fail"
        self._answered(kind, words, responses)

    def _failed(self, kind: str, words: str, error: grpc.aio.AioRpcError) -> None:
        rich = rich_error(error)
        end = (rich.code.name, rich.reason)
        if kind == "session" and rich.message == OWN:
            self.ends["of the client's own making"] += 1
            return
        allowed = LOST | ({FAILED} if kind == "fail" else set())
        assert end in allowed, (kind, words, rich)
        self.ends[end[1]] += 1

    def _answered(self, kind: str, words: str, responses: list[Response]) -> None:
        assert responses[-1].HasField("finished"), (kind, words)
        assert [r.seq for r in responses] == list(range(len(responses)))
        assert texts(responses) == words, kind
        spoken = b"".join(tone(word, None) for word in split_words(words))
        assert sound(responses) == (b"" if kind == "text" else spoken), kind
        self.ends["answered"] += 1

    async def _cancel(self, words: str) -> None:
        call = self._request("cancel", words)
        await asyncio.sleep(self._random.random() / 10)
        call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call.read()
        self.ends["cancelled"] += 1

    # ------------------------------------------------------------ input that streams

    def _chunks(self, words: str) -> Iterable[service_pb2.UpdateChunk]:
        """The words in pieces, one segment."""
        size = self._random.randint(1, 5)
        pieces = [words[at : at + size] for at in range(0, len(words), size)]
        for seq, piece in enumerate(pieces):
            yield Chunk(seq=seq, text=piece, end_of_segment=seq == len(pieces) - 1)

    async def _fed(self, words: str) -> None:
        """A resumable request and its feeder, which ends whatever becomes of the request."""
        request_id = new_id("fed")
        request = service_pb2.AddRequestRequest(
            request_id=request_id, pipeline="four", resumable=True
        )
        call = self._stub.AddRequest(request, timeout=30)
        feeding = asyncio.create_task(self._feed(call, request_id, list(self._chunks(words))))
        await self._read("fed", words, call)
        async with asyncio.timeout(30):
            await feeding

    async def _feed(
        self, call: Any, request_id: str, chunks: list[service_pb2.UpdateChunk]
    ) -> None:
        # A request that is refused has no initial metadata, and nothing to feed.
        await call.initial_metadata()
        feeder = self._stub.StreamingUpdate(timeout=30)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in (header(request_id), *(Update(chunk=one) for one in chunks)):
                await feeder.write(message)
            await feeder.done_writing()
            await feeder

    def _session(self, words: str) -> Any:
        """A session that opens, feeds and ends its input."""

        async def messages() -> AsyncIterator[service_pb2.SubmitInteractionRequest]:
            opening = {"pipeline": "four", "resumable": True}
            yield Interaction(setup={"open": opening})
            for one in self._chunks(words):
                yield Interaction(update=one)
            yield Interaction(end_input={})

        return self._stub.SubmitInteraction(messages(), timeout=30)


class Tormentor:
    """Kills, stops or slows a random replica of `pipeline` every `interval` seconds. Seeded."""

    def __init__(self, pipeline: str, interval: float, seed: int) -> None:
        self.deeds: Counter[str] = Counter()
        self._pipeline = pipeline
        self._interval = interval
        self._random = random.Random(seed)
        self._slowed: set[asyncio.Task[None]] = set()

    async def run(self, until: float) -> None:
        """Goes on until that moment of the loop's clock. Who is only slowed runs again then."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await asyncio.sleep(self._interval)
            if victims := self.victims():
                with suppress(psutil.Error):
                    self._do(self._random.choice(victims))
        await asyncio.gather(*self._slowed)

    def victims(self) -> list[psutil.Process]:
        """The pipeline's replica processes."""
        return [p for p in psutil.Process().children() if f"/{self._pipeline}-" in address(p)]

    def _do(self, victim: psutil.Process) -> None:
        deed = self._random.choice(("kill", "kill", "stop", "slow"))
        self.deeds[deed] += 1
        victim.send_signal(signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        if deed == "slow":
            task = asyncio.create_task(self._wake(victim))
            self._slowed.add(task)
            task.add_done_callback(self._slowed.discard)

    async def _wake(self, victim: psutil.Process) -> None:
        await asyncio.sleep(self._random.random())
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGCONT)


def address(process: psutil.Process) -> str:
    """What a replica was told to connect to; empty for one that is gone."""
    try:
        return "".join(process.cmdline()[-1:])
    except psutil.Error:
        return ""


def stopped(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of them stands still, and nobody has noticed yet."""
    for process in processes:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                return True
    return False
