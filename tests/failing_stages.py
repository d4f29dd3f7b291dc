"""Stages of engine `python` that fail as engines fail, when the prompt says so."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator

from omni_grpc.ipc import Task
from omni_grpc.stages.base import Inputs, ReplicaDead
from omni_grpc.types import Finish, FinishReason, StageOutput, StageStatistics, TextDelta
from tests.example_stages import Plain, prompt_text


class Failing(Plain):
    """Says "so far ", fails as the prompt says, and else echoes it."""

    _dead = False

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        word, _, moment = prompt_text(task).partition(" ")
        if moment != "at once":
            yield StageOutput(TextDelta("so far "))
            await asyncio.sleep(0.02)
        await self._fail(word)
        yield StageOutput(TextDelta(word), finish=Finish(FinishReason.STOP))

    async def _fail(self, how: str) -> None:
        match how:
            case "exit":
                os._exit(0)
            case "abort":
                os.kill(os.getpid(), signal.SIGABRT)
            case "segfault":
                ctypes.string_at(0)
            case "dead":
                raise ReplicaDead("the engine is dead")
            case "memory":
                raise MemoryError
            case "raise":
                raise RuntimeError("4711")
            case "stuck":
                await stuck()
            case "idle-death":
                self._dead = True

    def statistics(self) -> StageStatistics:
        if self._dead:
            raise ReplicaDead("the engine died while nobody asked it")
        return StageStatistics()


class Miscounting(Plain):
    """Serves, but fails to tell its load."""

    def statistics(self) -> StageStatistics:
        raise KeyError("load")


async def stuck() -> None:
    """Takes no notice of being cancelled, as a thread in a kernel that hangs does not."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
