"""Stages of engine `python`, with a bridge: examples of the extension point, and the ill-behaved
ones that tests need.

A pipeline names them by import path, `model: tests.example_stages:Shout`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from omni_grpc.errors import InvalidField
from omni_grpc.ipc import Task
from omni_grpc.pipelines.bridges import BridgeContext
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.types import (
    CustomParams,
    Finish,
    FinishReason,
    Payload,
    Progress,
    StageFacts,
    StageOutput,
    Text,
    TextDelta,
)

DONE = StageOutput(finish=Finish(FinishReason.STOP))


def custom(task: Task) -> dict[str, Any]:
    """The task's own parameters."""
    return task.params.values if isinstance(task.params, CustomParams) else {}


def prompt_text(task: Task) -> str:
    """The prompt's text; empty at later stages."""
    content = task.prompt.content if task.prompt is not None else None
    return content.text if isinstance(content, Text) else ""


class Plain(Stage[None]):
    """What the stages here have in common: nothing to load, nothing to check, one text."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> None:
        return None

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        yield StageOutput(TextDelta(self.text(task)))
        yield DONE

    def text(self, task: Task) -> str:
        """What it says."""
        return prompt_text(task)


class Stepping(Plain):
    """Tells two steps, with half a second after each, and then gives its text."""

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        for step in (1, 2):
            yield StageOutput(progress=Progress(step, 2))
            await asyncio.sleep(0.5)
        yield StageOutput(TextDelta(self.text(task)))
        yield DONE


class Shout(Stage[int]):
    """Says what it hears in capitals, `times` times (1 to 3; by default 1). The worked example."""

    async def load(self) -> StageFacts:
        return StageFacts(versions={"shout": str(self.spec.engine_args.get("version", "none"))})

    async def prepare(self, task: Task) -> int:
        times = custom(task).get("times", 1)
        if times not in (1, 2, 3):
            raise InvalidField("params.times", "must be 1, 2 or 3")
        return int(times)

    async def run(self, task: Task, prepared: int, inputs: Inputs) -> AsyncIterator[StageOutput]:
        async for feed in inputs:
            if isinstance(feed.payload, TextDelta):
                yield StageOutput(TextDelta(feed.payload.text.upper() * prepared))
        yield DONE


class Exclaim:
    """A bridge: marks each word, and says at the end how many there were."""

    def __init__(self, context: BridgeContext) -> None:
        self._words = 0
        self._context = context

    def push(self, payload: Payload) -> Iterable[Payload]:
        if isinstance(payload, TextDelta):
            self._words += 1
            yield TextDelta(payload.text.strip() + "! ")

    def finish(self) -> Iterable[Payload]:
        yield TextDelta(f"({self._words} from {self._context.source} to {self._context.target})")


class Sleepy:
    """A bridge that blocks the server's event loop for a second at each output. Never do this."""

    def __init__(self, context: BridgeContext) -> None:
        pass

    def push(self, payload: Payload) -> Iterable[Payload]:
        time.sleep(1.0)
        return (payload,)

    def finish(self) -> Iterable[Payload]:
        return ()


class TellEnvironment(Plain):
    """Says which replica it is, and the variables that the prompt names, as JSON."""

    def text(self, task: Task) -> str:
        names = prompt_text(task).split()
        told = {name: os.environ.get(name) for name in names}
        spec = self.spec
        return json.dumps({"replica": spec.replica, "device": spec.device, **told})


class Burst(Plain):
    """Gives `outputs` texts in one turn of its event loop, as one engine step of a batch would."""

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        for number in range(int(custom(task)["outputs"])):
            yield StageOutput(TextDelta(f"{number} "))
        yield DONE


class Chatty(Plain):
    """Prints on both streams, and dies with a last word where the prompt is `die`."""

    async def load(self) -> StageFacts:
        print("a line on stdout")
        print("a line on stderr", file=sys.stderr)
        return StageFacts()

    def text(self, task: Task) -> str:
        if prompt_text(task) == "die":
            print("last words")
            print("and no newline", end="", flush=True)
            os._exit(3)
        return prompt_text(task)


class Parent(Plain):
    """Starts processes of its own, as real engines do; says their ids."""

    async def load(self) -> StageFacts:
        # The shell stays as the parent of the first sleep: a child and a grandchild.
        shell = await asyncio.create_subprocess_exec(
            "sh", "-c", "sleep 60 & echo $!; wait", stdout=asyncio.subprocess.PIPE
        )
        assert shell.stdout is not None
        self._pids = [shell.pid, int(await shell.stdout.readline())]
        return StageFacts()

    def text(self, task: Task) -> str:
        return json.dumps(self._pids)


class Sharing(Plain):
    """Has shared memory, as has a process that it started; says their names."""

    async def load(self) -> StageFacts:
        self._own = SharedMemory(create=True, size=1 << 16)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from multiprocessing.shared_memory import SharedMemory as M; import time\n"
            "memory = M(create=True, size=65536); print(memory.name, flush=True); time.sleep(100)",
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        self._names = [self._own.name, (await child.stdout.readline()).decode().strip()]
        # What is mapped shows when the watcher looks, a second after the start.
        await asyncio.sleep(2)
        return StageFacts()

    def text(self, task: Task) -> str:
        return json.dumps(self._names)


class Unloadable(Plain):
    """Fails to load."""

    async def load(self) -> StageFacts:
        raise FileNotFoundError("weights.bin is not where it should be")


class BlockedLoad(Plain):
    """Holds its event loop while it loads, as most engines do."""

    async def load(self) -> StageFacts:
        print("loading for long")
        time.sleep(1000)  # noqa: ASYNC251 - that is the point
        return StageFacts()


class Raises(Plain):
    """Raises after one output."""

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        yield StageOutput(TextDelta("so far "))
        await asyncio.sleep(0.05)
        raise RuntimeError("the secret is 4711")


class Stubborn(Plain):
    """Goes on for half a second after it was cancelled, as a kernel that runs does."""

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        yield StageOutput(TextDelta("working "))
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.to_thread(time.sleep, 0.5)
        yield DONE


class SlowClose(Plain):
    """Takes far too long to close."""

    async def close(self) -> None:
        await asyncio.sleep(1000)


class NotAStage:
    """Something else."""

    def __init__(self, spec: object) -> None:
        pass
