"""`smol-voice`, several requests at once, beside the same models called directly in one process.

Directly: the stages' own classes, without server, queues, processes and messages between them. Both
are load generators to the harness; a piece's tokens are samples."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.load import Load, Taken
from bench.processes import Measured, environment, free_port
from bench.protocols import Adapter, GrpcAdapter, Piece

PIPELINE = "smol-voice"
SAMPLE_RATE_HZ = 24000
TIMEOUT_S = 600.0
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "How does a sailing boat move?",
    "What is bread made of?",
    "Why do leaves fall in autumn?",
    "What is a volcano?",
)


class Served(GrpcAdapter):
    """Through our server."""

    async def open(self, target: str) -> None:
        from omni_grpc.v1 import service_pb2, service_pb2_grpc

        await super().open(target)
        self._stub = service_pb2_grpc.OmniServiceStub(self.channel)
        self._request = service_pb2.AddRequestRequest

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        request = self._request(request_id=self.next_id(), prompt={"text": prompt})
        async for response in self._stub.AddRequest(request):
            if response.output.HasField("audio"):
                yield Piece(len(response.output.audio.data) // 2, "")


class Direct(Adapter):
    """The models in this process."""

    async def open(self, target: str) -> None:
        from omni_grpc.config import load_pipeline
        from omni_grpc.embedded import resolve
        from omni_grpc.ipc import StageSpec
        from omni_grpc.params import merge, parse_params
        from omni_grpc.stages import registry

        self._ids = itertools.count(1)
        self._stages, self._params = [], []
        for config in load_pipeline(PIPELINE).stages:
            model = str(resolve(config.model))
            spec = StageSpec(PIPELINE, config.name, 0, config.engine, model, "cpu")
            spec = StageSpec(**{**_fields(spec), "engine_args": config.engine_args})
            stage = registry.build(spec)
            await stage.load()
            self._stages.append(stage)
            fixed = parse_params(config.engine, config.constraints) if config.constraints else None
            defaults = parse_params(config.engine, config.defaults)
            self._params.append(merge(defaults, None, fixed, "params"))

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        from omni_grpc.ipc import Feed
        from omni_grpc.stages.base import Inputs
        from omni_grpc.types import Prompt, Text, TextDelta

        number = next(self._ids)
        text, frames, nothing = Inputs(), Inputs(), Inputs()
        nothing.put(Feed(number, end=True))

        async def think() -> None:
            async for output in self._run(0, number, nothing, Prompt(Text(prompt))):
                if isinstance(output.payload, TextDelta) and output.payload.text:
                    text.put(Feed(number, payload=TextDelta(output.payload.text)))
            text.put(Feed(number, end=True))

        async def talk() -> None:
            async for output in self._run(1, number, text):
                if output.payload is not None:
                    frames.put(Feed(number, payload=output.payload))
            frames.put(Feed(number, end=True))

        async with asyncio.TaskGroup() as group:
            group.create_task(think())
            group.create_task(talk())
            async for output in self._run(2, number, frames):
                if output.payload is not None:
                    yield Piece(len(output.payload.data) // 2, "")

    async def _run(
        self, place: int, number: int, inputs: Any, prompt: Any = None
    ) -> AsyncIterator[Any]:
        from omni_grpc.ipc import Task

        stage, name = self._stages[place], f"direct-{number}"
        params, streaming = self._params[place], prompt is None
        task = Task(number, name, params, TIMEOUT_S, prompt=prompt, streaming=streaming)
        prepared = await stage.prepare(task)
        async for output in stage.run(task, prepared, inputs):
            yield output

    async def close(self) -> None:
        for stage in self._stages:
            await stage.close()


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


PROTOCOLS: dict[str, type[Adapter]] = {"voice": Served, "voice-direct": Direct}


def _speech(taken: Taken) -> float:
    """Seconds of speech per second."""
    return taken.tokens / SAMPLE_RATE_HZ / (taken.ended - taken.started)


def measure(logs: Path, rounds: int) -> dict[str, float]:
    """Speech and first audio of eight requests at once, served and direct, turn by turn."""
    from omni_grpc.config import load_pipeline
    from omni_grpc.embedded import prepare

    config, port = load_pipeline(PIPELINE), free_port()
    prepare({stage.model for stage in config.stages}, lambda line: print(line, file=sys.stderr))
    env = environment(**config.stages[0].environment)
    command = ["serve", "--pipeline", PIPELINE, "--port", str(port)]
    with ExitStack() as stack:
        server = Measured.module("omni_grpc.cli", *command, log=logs / "voice.log")
        stack.enter_context(server)
        loads = {}
        for protocol, target in (("voice", f"127.0.0.1:{port}"), ("voice-direct", "")):
            log = logs / f"load-{protocol}.log"
            loads[protocol] = Load(protocol, target, 1, env, log, QUESTIONS[0])
            stack.callback(loads[protocol].close)
            loads[protocol].ready()
        taken = [(loads["voice"].run(QUESTIONS, 0), loads["voice-direct"].run(QUESTIONS, 0))]
        taken += [
            (loads["voice"].run(QUESTIONS, 0), loads["voice-direct"].run(QUESTIONS, 0))
            for _ in range(rounds)
        ]
    # The first one warms caches of both.
    return _figures(taken[1:])


def _figures(taken: list[tuple[Taken, Taken]]) -> dict[str, float]:
    middle = statistics.median
    for served, direct in taken:
        print(
            f"    served {_speech(served):.1f} s/s, first audio {middle(served.first):.2f} s;"
            f" direct {_speech(direct):.1f} s/s, {middle(direct.first):.2f} s",
            flush=True,
        )
    return {
        "voice_throughput_vs_direct": middle(_speech(a) / _speech(b) for a, b in taken),
        "voice_ttfa_vs_direct": middle(middle(a.first) / middle(b.first) for a, b in taken),
        "voice_speech_s_per_s": middle(_speech(a) for a, _ in taken),
        "voice_first_audio_s": middle(middle(a.first) for a, _ in taken),
        "voice_samples_vs_direct": middle(a.tokens / b.tokens for a, b in taken),
    }
