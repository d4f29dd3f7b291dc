"""Stages and bridges that do what they must not, for tests: loaded by import path, as a user's own
are. What a stage does is its parameter `does`; what a bridge does is the prompt's text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from omni_grpc.errors import InvalidField, InvalidMedia, PromptTooLong, Violation
from omni_grpc.ipc import Task
from omni_grpc.pipelines.bridges import BridgeContext
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.types import (
    CustomParams,
    Finish,
    FinishReason,
    Payload,
    Prompt,
    StageFacts,
    StageOutput,
    Text,
    TextDelta,
)

SECRET = "secret-7f3a"

FINISH = StageOutput(finish=Finish(FinishReason.STOP))


async def leak_cancellation() -> None:
    """Waits for an inner task that somebody else cancelled."""
    inner = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner


class FaultyStage(Stage[dict[str, Any]]):
    """Says "one two " and does what its parameters say on the way."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> dict[str, Any]:
        does = task.params.values if isinstance(task.params, CustomParams) else {}
        if "mark" in does:
            Path(does["mark"]).touch()  # noqa: ASYNC240
        match does.get("does"):
            case "raise in prepare":
                raise ValueError(SECRET)
            case "leak a cancellation in prepare":
                await leak_cancellation()
            case "find the prompt too long":
                raise PromptTooLong("the prompt has 9 tokens, the context 8")
            case "find bad media":
                raise InvalidMedia("media[0]: not a picture")
            case "find 1000 violations":
                # Long and not ASCII: most bytes per character on the wire.
                text = "fällt nicht in den Bereich " * 20
                more = [Violation(f"params.field_{n}", text) for n in range(1, 1000)]
                raise InvalidField("params.field_0", text, *more)
        return does

    async def run(
        self, task: Task, prepared: dict[str, Any], inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        does = prepared.get("does")
        if does == "raise before any output":
            raise ValueError(SECRET)
        yield StageOutput(TextDelta("one "))
        await self._misbehave(does)
        yield StageOutput(bad_payload(does) or TextDelta("two "))
        yield FINISH

    async def _misbehave(self, does: str | None) -> None:
        match does:
            case "raise after an output":
                raise ValueError(SECRET)
            case "raise a group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._misbehave("raise after an output"))
            case "time out by itself":
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)
            case "leak a cancellation":
                await leak_cancellation()
            case "hang":
                await asyncio.sleep(3600)
            case "raise when cancelled":
                try:
                    await asyncio.sleep(3600)
                finally:
                    raise ValueError(SECRET)


def bad_payload(does: str | None) -> Payload | None:
    """An output that is none, as a careless stage makes it."""
    match does:
        case "give text that is a number":
            return TextDelta(123)  # type: ignore[arg-type]
        case "give bytes for a text":
            return TextDelta(b"two ")  # type: ignore[arg-type]
        case "give an object":
            return TextDelta("two ", [object()])  # type: ignore[list-item]
        case "give half a surrogate pair":
            return TextDelta("\ud83d")
        case "give a negative token id":
            return TextDelta("two ", [-1])
    return None


class ClockStage(Stage[None]):
    """Says how much time its task was given, after what it hears and `wait` seconds."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> None:
        return None

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        async for feed in inputs:
            if isinstance(feed.payload, TextDelta):
                yield StageOutput(feed.payload)
        await asyncio.sleep(float(self.spec.engine_args.get("wait", 0)))
        yield StageOutput(TextDelta(f"{task.timeout_s} "))
        yield FINISH


class FaultyBridge:
    """Hands on what comes, unless the prompt's text tells it otherwise."""

    def __init__(self, context: BridgeContext) -> None:
        content = context.prompt.content
        self._does = getattr(content, "text", "")
        self._misbehave("construction")

    def push(self, payload: Payload) -> Iterable[Payload | Prompt]:
        self._misbehave("push")
        match self._does:
            case "give half a surrogate pair":
                return (TextDelta("\ud83d"),)
            case "give a number for a text":
                return (TextDelta(7),)  # type: ignore[arg-type]
            case "begin with half a surrogate pair":
                return (Prompt(Text("\ud83d")),)
            case "begin with a number for a text":
                return (Prompt(Text(7)),)  # type: ignore[arg-type]
        return (payload,)

    def finish(self) -> Iterable[Payload]:
        self._misbehave("finish")
        return ()

    def _misbehave(self, place: str) -> None:
        if self._does == f"raise in {place}":
            raise ValueError(SECRET)
        if self._does == f"leak a cancellation in {place}":
            raise asyncio.CancelledError
