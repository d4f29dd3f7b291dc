"""Runs cases of the list against a server, through one peer. README.md has the rules."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.conformance.check import Json, Outcome, matches, problems

FOLDER = Path(__file__).parent
LIST = FOLDER / "list.yaml"
WRONG = FOLDER / "wrong.yaml"
DEADLINE_MS = 10_000
EVENTUALLY_S = 10


class Call(Protocol):
    """A call under way, through some gRPC implementation. Messages are protobuf's JSON."""

    def send(self, message: Json) -> None:
        """Sends a message. A call that has ended takes no notice."""

    def close(self) -> None:
        """Half-closes."""

    def cancel(self) -> None:
        """Cancels."""

    def read(self) -> Json | None:
        """The next message; None when the call has ended."""

    def outcome(self) -> Outcome:
        """How it ended; without its messages."""


class Peer(Protocol):
    """A gRPC implementation."""

    def start(self, rpc: str, metadata: Mapping[str, str], deadline_s: float) -> Call:
        """Starts a call of OmniService, or of health for `Check`."""


def read_cases(path: Path) -> list[Json]:
    """The cases of a list."""
    cases: list[Json] = yaml.safe_load(path.read_text())["cases"]
    return cases


class Case:
    """One run of one case."""

    def __init__(self, peer: Peer, case: Json) -> None:
        self._peer = peer
        self._calls: dict[str, tuple[str, Call, list[Json]]] = {}
        unique = json.dumps(case).replace("${id}", f"case-{uuid.uuid4().hex[:12]}")
        self._case: Json = json.loads(unique)

    def run(self) -> list[str]:
        """What is wrong; nothing if it passes. Leaves no call behind."""
        try:
            for step in self._case.get("steps", [self._case]):
                if found := self._step(step):
                    return found
            return []
        finally:
            for _, call, _ in self._calls.values():
                call.cancel()

    def _step(self, step: Json) -> list[str]:
        match step:
            case {"start": name}:
                self._calls[name] = self._start(step)
            case {"rpc": _}:
                return self._whole(step)
            case {"send": name}:
                self._send(self._calls[name][1], step)
            case {"await": name}:
                return self._await(name, step["message"])
            case {"cancel": name}:
                self._calls[name][1].cancel()
            case {"end": name}:
                return self._end(*self._calls[name], step.get("expect", {}))
            case _:
                raise ValueError(f"not a step: {step}")
        return []

    def _start(self, step: Json) -> tuple[str, Call, list[Json]]:
        deadline = step.get("deadline_ms", DEADLINE_MS) / 1e3
        call = self._peer.start(step["rpc"], step.get("metadata", {}), deadline)
        self._send(call, step)
        return step["rpc"], call, []

    def _send(self, call: Call, step: Json) -> None:
        for message in step.get("messages", []):
            call.send(message)
        if not step.get("open", False):
            call.close()

    def _whole(self, step: Json) -> list[str]:
        end = time.monotonic() + EVENTUALLY_S
        while True:
            found = self._end(*self._start(step), step.get("expect", {}))
            if not found or not step.get("eventually") or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def _await(self, name: str, wanted: Any) -> list[str]:
        _, call, heard = self._calls[name]
        while (message := call.read()) is not None:
            heard.append(message)
            if matches(wanted, message):
                return []
        return [f"{name} ended with {call.outcome()} before {wanted}"]

    def _end(self, rpc: str, call: Call, heard: list[Json], expect: Json) -> list[str]:
        while (message := call.read()) is not None:
            heard.append(message)
        outcome = call.outcome()
        outcome.messages = heard
        return list(problems(rpc, expect, outcome))


def run_case(peer: Peer, case: Json) -> list[str]:
    """What is wrong with a case; nothing if it passes."""
    return Case(peer, case).run()
