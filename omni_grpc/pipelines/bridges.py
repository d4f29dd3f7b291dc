"""Bridges: what makes a stage's input of the outputs of the stage before it. They run in the
server, torch-free.

A bridge lives for one request and one pair of stages. It is a small state machine: `push` takes one
output and gives what is ready for the next stage, `finish` gives the rest when the source has
ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from omni_grpc.errors import ConfigError
from omni_grpc.types import Payload, Prompt, Text, TextDelta


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
        """What the next stage gets after this output of the source: content, or a prompt for a stage
        that takes prompts."""

    def finish(self) -> Iterable[Payload | Prompt]:
        """What it gets when the source has ended a segment, or all: then the bridge begins anew."""


BridgeFactory = Callable[[BridgeContext], Bridge]


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


class WholeText:
    """Waits for the source's end and hands on its whole text in one piece."""

    def __init__(self, context: BridgeContext) -> None:
        self._parts: list[str] = []

    def push(self, payload: Payload) -> Iterable[Payload]:
        if isinstance(payload, TextDelta):
            self._parts.append(payload.text)
        return ()

    def finish(self) -> Iterable[Payload]:
        parts, self._parts = self._parts, []
        return (TextDelta("".join(parts)),) if parts else ()


class Question:
    """Waits for the source's end and makes its whole text the prompt of the next stage."""

    def __init__(self, context: BridgeContext) -> None:
        self._parts: list[str] = []

    def push(self, payload: Payload) -> Iterable[Prompt]:
        if isinstance(payload, TextDelta):
            self._parts.append(payload.text)
        return ()

    def finish(self) -> Iterable[Prompt]:
        parts, self._parts = self._parts, []
        return (Prompt(Text("".join(parts))),) if parts else ()


_BUILT_IN: dict[str, BridgeFactory] = {
    "forward": Forward,
    "spoken-text": SpokenText,
    "whole-text": WholeText,
    "question": Question,
}


def load_bridge(name: str) -> BridgeFactory:
    """The bridge of that name, or the factory at the import path `package.module:factory`. Raises
    ConfigError."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, _, attribute = name.partition(":")
    try:
        factory: BridgeFactory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(_BUILT_IN)
        raise ConfigError(
            f"bridge {name!r}: neither one of {known} nor importable: {error}"
        ) from None
    return factory
