"""Bridges: what makes a stage's input of the outputs of the stage before it. They run in the
server, torch-free.

A bridge lives for one request and one pair of stages. It is a small state machine: `push` takes one
output and gives what is ready for the next stage, `finish` gives the rest when the source has
ended."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from omni_grpc.errors import ConfigError
from omni_grpc.pipelines.imported import imported
from omni_grpc.types import Media, Message, Messages, Payload, Prompt, Text, TextDelta


@dataclass(frozen=True, slots=True)
class BridgeContext:
    """What a bridge may know of its request: the prompt as the client sent it, never changed."""

    request_id: str
    prompt: Prompt
    source: str
    target: str


class Bridge(Protocol):
    """One request's bridge between two stages."""

    def push(self, payload: Payload) -> Iterable[Payload | Prompt]:
        """What the next stage gets after this output of the source: content, or a prompt for a
        stage that takes prompts."""

    def finish(self) -> Iterable[Payload | Prompt]:
        """What it gets when the source has ended a segment, or all: then the bridge begins anew."""


class GuidedBridge(Bridge, Protocol):
    """A bridge that can hand on a guidance group: what a pipeline with an expansion needs."""

    def join(self, companions: Sequence[tuple[str, list[Payload]]]) -> Iterable[Payload | Prompt]:
        """What the next stage gets of the source and its companions, given as (role, outputs) in
        order. Called in place of `finish`, once, when all have ended."""


BridgeFactory = Callable[[BridgeContext], Bridge]

MEDIA_SEPARATOR = "\n\n"
"""What stands between the texts of two media, where a stage makes text of several."""


class Forward:
    """Hands every output on as it is, at once."""

    def __init__(self, context: BridgeContext) -> None:
        pass

    def push(self, payload: Payload) -> Iterable[Payload]:
        return (payload,)

    def finish(self) -> Iterable[Payload]:
        return ()


class SpokenText:
    """Hands on text only (no token ids, no log-probabilities, nothing empty): what a talker
    needs."""

    def __init__(self, context: BridgeContext) -> None:
        pass

    def push(self, payload: Payload) -> Iterable[Payload]:
        if isinstance(payload, TextDelta) and payload.text:
            return (TextDelta(payload.text),)
        return ()

    def finish(self) -> Iterable[Payload]:
        return ()


class Collected:
    """Base of bridges that wait for the source's end and then make something of its whole text."""

    def __init__(self, context: BridgeContext) -> None:
        self._parts: list[str] = []

    def push(self, payload: Payload) -> Iterable[Payload | Prompt]:
        """Nothing yet."""
        if isinstance(payload, TextDelta):
            self._parts.append(payload.text)
        return ()

    def take(self) -> str | None:
        """The text since the last take; None where no output came at all."""
        parts, self._parts = self._parts, []
        return "".join(parts) if parts else None


class WholeText(Collected):
    """Waits for the source's end and hands on its whole text in one piece."""

    def finish(self) -> Iterable[Payload]:
        text = self.take()
        return (TextDelta(text),) if text is not None else ()


class Question(Collected):
    """Waits for the source's end and makes its whole text the prompt of the next stage."""

    def finish(self) -> Iterable[Prompt]:
        text = self.take()
        return (Prompt(Text(text)),) if text is not None else ()


class Transcript(Collected):
    """Waits for the source's end and makes its texts the prompt of the next stage.

    Media alone: `instruction`, then the texts. Beside text: that text, then the texts; what the
    client says stands in for `instruction`. In messages: each medium's text in its place."""

    def __init__(self, context: BridgeContext, instruction: str = "") -> None:
        super().__init__(context)
        self._prompt = context.prompt
        self._instruction = instruction

    def finish(self) -> Iterable[Prompt]:
        whole = self.take()
        if whole is None:
            return ()
        texts = whole.split(MEDIA_SEPARATOR)
        match self._prompt.content:
            case Messages(messages):
                rest = iter(texts)
                return (Prompt(Messages(tuple(_told(message, rest) for message in messages))),)
            case Text(text):
                instruction = text
            case _:
                instruction = self._instruction
        # On one line: small models lose sight of an instruction that stands apart.
        told = "\n".join(texts)
        return (Prompt(Text(f"{instruction} {told}".strip())),)


def _told(message: Message, texts: Iterator[str]) -> Message:
    """The message with the next of the texts in place of each medium, on lines of their own."""
    parts: list[Text | Media] = []
    last = len(message.parts) - 1
    for place, part in enumerate(message.parts):
        if isinstance(part, Media):
            before, after = "\n" if place else "", "\n" if place < last else ""
            part = Text(before + next(texts, "") + after)
        parts.append(part)
    return Message(message.role, tuple(parts))


class GuidedPrompt(Question):
    """As `question`, with the text of the companion "negative" as the prompt's negative text."""

    def join(self, companions: Sequence[tuple[str, list[Payload]]]) -> Iterable[Prompt]:
        text = self.take() or ""
        negative = next((outputs for role, outputs in companions if role == "negative"), None)
        negative_text = None
        if negative is not None:
            negative_text = "".join(p.text for p in negative if isinstance(p, TextDelta))
        return (Prompt(Text(text), negative_text=negative_text),)


_BUILT_IN: dict[str, BridgeFactory] = {
    "forward": Forward,
    "spoken-text": SpokenText,
    "whole-text": WholeText,
    "question": Question,
    "guided-prompt": GuidedPrompt,
    "transcript": Transcript,
}


def load_bridge(name: str, arguments: Mapping[str, Any] | None = None) -> BridgeFactory:
    """The bridge of that name, or the factory at the import path `package.module:factory`, with
    these arguments. Raises ConfigError."""
    factory: BridgeFactory = _BUILT_IN.get(name) or imported("bridge", name, _BUILT_IN)
    if not arguments:
        return factory
    try:
        inspect.signature(factory).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"bridge {name!r}: bridge_args: {error}") from None
    return partial(factory, **arguments)
