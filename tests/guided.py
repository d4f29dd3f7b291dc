"""A transform, an expansion, bridges and stages that tell what they were given, or break where they
are told to: what tests of transforms and companions put into pipelines, by import path."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_grpc.config import PipelineConfig
from omni_grpc.ipc import Task
from omni_grpc.params import FakeScript
from omni_grpc.pipelines.bridges import BridgeContext, WholeText
from omni_grpc.pipelines.expansions import Companion, ExpansionContext
from omni_grpc.pipelines.transforms import TransformContext, Transformed
from omni_grpc.stages.base import Segment
from omni_grpc.stages.fake import FakeStage
from omni_grpc.types import (
    CustomParams,
    Image,
    Params,
    Payload,
    Prompt,
    Text,
    TextDelta,
    TokenIds,
)
from tests.support import ENVIRONMENT, Response, picture, script

SECRET = "secret-91be"

# ---------------------------------------------------------------- a transform


@dataclass(frozen=True)
class Call:
    """One call of the transform, with the directories that it made so far."""

    request_id: str
    prompt: Prompt
    information: dict[str, Any]
    thread: str
    made: list[Path]


CALLS: list[Call] = []
"""All calls in this process."""
GATE = threading.Event()
"""What a transform waits for that is told to."""


def calls(request_id: str) -> list[Call]:
    """The calls for a request."""
    return [call for call in CALLS if call.request_id == request_id]


def made(request_id: str) -> list[Path]:
    """The directories that were made for a request."""
    return [path for call in calls(request_id) for path in call.made]


def acting(prompt: Prompt, context: TransformContext) -> Transformed:
    """Does what the request's `do` says (in its additional information), one deed after another."""
    information = dict(context.additional_information)
    # Streamed chunks bring their deeds as text.
    told = prompt.content.text if isinstance(prompt.content, Text) else ""
    deeds = information.get("do") or [d for d in told.split(", ") if d in DEEDS]
    here = Call(context.request_id, prompt, information, threading.current_thread().name, [])
    CALLS.append(here)
    result = Transformed(prompt)
    for deed in deeds:
        name, _, argument = deed.partition("=")
        result = DEEDS[name](result, context, here, argument)
    return result


Deed = Callable[[Transformed, TransformContext, Call, str], Any]


def _make(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    directory = context.artifacts.make_directory()
    here.made.append(directory)
    (directory / "nested").mkdir()
    (directory / "nested" / "file").write_text("content")
    return result


def _own(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    directory = Path(tempfile.mkdtemp(dir=context.artifacts.make_directory().parent))
    here.made.append(directory)
    return Transformed(result.prompt, {}, (*result.artifact_directories, directory))


def _claim(result: Transformed, context: TransformContext, here: Call, path: str) -> Transformed:
    claimed = context.artifacts.make_directory().parents[1] / path
    return Transformed(result.prompt, {}, (claimed, *result.artifact_directories))


def _again(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    return Transformed(result.prompt, {}, tuple(made(context.request_id)))


def _mutate(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    """Changes whatever is not frozen."""
    if isinstance(result.prompt.content, TokenIds):
        result.prompt.content.ids.append(4711)
    for params in context.params.values():
        if isinstance(params, CustomParams):
            params.values["outputs"] = 7
    information: Any = context.additional_information
    information["nested"]["list"].append(SECRET)
    information["global_request_id"] = information["more"] = SECRET
    return result


def _anew(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    information = {"caption": "a ring", "global_request_id": SECRET}
    return Transformed(Prompt(Text("all new")), information, result.artifact_directories)


def _wait(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    assert GATE.wait(20)
    for directory in here.made:
        (directory / "late").mkdir(parents=True, exist_ok=True)
        (directory / "late" / "file").write_text("late")
    return result


def _block(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    time.sleep(0.5)
    return result


def _break(result: Transformed, context: TransformContext, here: Call, _: str) -> Transformed:
    raise ZeroDivisionError(SECRET)


def _give(result: Transformed, context: TransformContext, here: Call, what: str) -> Any:
    """Something that is no result."""
    prompt, paths = result.prompt, result.artifact_directories
    wrong: dict[str, Any] = {
        "nothing": None,
        "a prompt": prompt,
        "text as a prompt": Transformed("text", {}, paths),  # type: ignore[arg-type]
        "a number as text": Transformed(Prompt(Text(123)), {}, paths),  # type: ignore[arg-type]
        "an object": Transformed(prompt, {"path": Path("/tmp")}, paths),
        "half a surrogate pair": Transformed(Prompt(Text("\ud83d")), {}, paths),
        "a list": Transformed(prompt, ["a"], paths),  # type: ignore[arg-type]
    }
    return wrong[what]


DEEDS: dict[str, Deed] = {
    "make": _make,
    "own": _own,
    "claim": _claim,
    "again": _again,
    "mutate": _mutate,
    "anew": _anew,
    "wait": _wait,
    "block": _block,
    "break": _break,
    "give": _give,
}

# ---------------------------------------------------------------- an expansion


def told(context: ExpansionContext) -> Iterable[Companion]:
    """The companions that the negative text lists, as JSON: [role, text, script] each."""
    negative = context.prompt.negative_text
    if negative is None:
        return
    if negative == "break":
        raise ZeroDivisionError(SECRET)
    if negative == "break late":
        yield Companion("first", Prompt(Text("fine")))
        raise ZeroDivisionError(SECRET)
    if isinstance(context.prompt.content, TokenIds):
        # It must be a copy.
        context.prompt.content.ids.clear()
    for role, text, values in json.loads(negative):
        overrides = values if "values" in values or "wrong" in values else {"values": values}
        yield Companion(role, Prompt(Text(text)), overrides)


def listed(*companions: tuple[str, str, dict[str, Any]]) -> str:
    """The negative text that asks for these."""
    return json.dumps(companions)


# ---------------------------------------------------------------- bridges


class Pair(WholeText):
    """The source's text as the prompt, with the companions' as negative text: a list, as JSON."""

    def __init__(self, context: BridgeContext) -> None:
        super().__init__(context)
        self._raises = getattr(context.prompt.content, "text", "") == "break in join"

    def finish(self) -> Iterable[Any]:
        return (Prompt(Text(self._text())),)

    def join(self, companions: Sequence[tuple[str, list[Payload]]]) -> Iterable[Prompt]:
        if self._raises:
            raise ZeroDivisionError(SECRET)
        texts = [
            (role, "".join(p.text for p in outputs if isinstance(p, TextDelta)))
            for role, outputs in companions
        ]
        return (Prompt(Text(self._text()), negative_text=json.dumps(texts)),)

    def _text(self) -> str:
        parts, self._parts = self._parts, []
        return "".join(parts)


class Original(WholeText):
    """Tells the request's prompt as the client sent it, in place of what the source said."""

    def __init__(self, context: BridgeContext) -> None:
        super().__init__(context)
        self._prompt = context.prompt

    def finish(self) -> Iterable[Any]:
        content = self._prompt.content
        said = content.ids if isinstance(content, TokenIds) else getattr(content, "text", None)
        return (Prompt(Text(json.dumps([said, self._prompt.negative_text]))),)


# ---------------------------------------------------------------- stages


class Teller(FakeStage):
    """A fake stage of text that tells its task, where its script does not say otherwise."""

    async def _answer(
        self, task: Task, script: FakeScript, segment: Segment
    ) -> AsyncIterator[Payload]:
        if script.outputs is None and not task.resumable:
            yield TextDelta(json.dumps(self._told(task)))
            return
        async for payload in super()._answer(task, script, segment):
            yield payload

    def _told(self, task: Task) -> dict[str, Any]:
        content = task.prompt.content if task.prompt is not None else None
        return {
            "id": task.request_id,
            "said": content.ids if isinstance(content, TokenIds) else getattr(content, "text", ""),
            "params": task.params.values if isinstance(task.params, CustomParams) else None,
            "replica": self.spec.replica,
            "timeout_s": task.timeout_s,
            "arrival_time": task.options.arrival_time,
            "trace": task.options.trace_headers,
            "information": task.options.additional_information,
        }


class Painter(FakeStage):
    """Draws the JSON of [prompt, negative text, how many prompts it was fed after its first]."""

    async def _answer(
        self, task: Task, script: FakeScript, segment: Segment
    ) -> AsyncIterator[Payload]:
        fed = [feed async for feed in segment if feed.prompt is not None or feed.payload]
        prompt = task.prompt or Prompt()
        content = getattr(prompt.content, "text", None)
        data = json.dumps([content, prompt.negative_text, len(fed)]).encode()
        yield Image(data, "application/json", 1, 1)


def drawn(responses: Iterable[Response]) -> tuple[Any, Any]:
    """(prompt, [[role, text] of each companion] or None) of the one picture that came."""
    content, negative, fed = json.loads(picture(list(responses)))
    assert fed == 0, "it was handed on more than once"
    return content, None if negative is None else json.loads(negative)


# ---------------------------------------------------------------- pipelines

TELLER = {"engine": "python", "model": "tests.guided:Teller"}
PAINTER = {
    "engine": "python",
    "model": "tests.guided:Painter",
    "engine_args": {"modality": "image"},
}


def guided(
    name: str,
    thinker: dict[str, Any] | None = None,
    painter: dict[str, Any] | None = None,
    **settings: Any,
) -> PipelineConfig:
    """thinker (text) → painter (image), with the expansion `told`."""
    first = {"name": "thinker", "output": "text", **TELLER, **(thinker or {})}
    second = {"name": "painter", "output": "image", "inputs": ["thinker"], **PAINTER}
    second |= {"bridge": "tests.guided:Pair", **(painter or {})}
    content: dict[str, Any] = {
        "name": name,
        "prompts": ["text", "token_ids"],
        "guidance": True,
        "expansion": "tests.guided:told",
        "stages": [{"environment": ENVIRONMENT, **stage} for stage in (first, second)],
    }
    return PipelineConfig.model_validate(content | settings)


def thinking(**values: Any) -> list[Any]:
    """Parameters for the thinker."""
    return [script("thinker", **values)]


def custom(params: Params) -> dict[str, Any]:
    """The values of parameters that are a mapping."""
    assert isinstance(params, CustomParams)
    return params.values
