"""Whether what came of a call is what the list expects. README.md has the rules."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Json = dict[str, Any]

DOMAIN = "omni-grpc"
BYTES_PER_SAMPLE = 2
MAX_AUDIO = 64 << 10
MAX_MESSAGE = 1 << 20
STREAMS = ("AddRequest", "SubmitInteraction")


@dataclass(slots=True)
class Outcome:
    """What came of a call. `headers` and `trailers` are None where the peer does not show them;
    `reserved`: it shows trailers whose names begin with "grpc-"."""

    messages: list[Json] = field(default_factory=list)
    code: str = "OK"
    message: str = ""
    domain: str = ""
    reason: str = ""
    fields: list[str] = field(default_factory=list)
    retry_ms: int | None = None
    headers: dict[str, str] | None = None
    trailers: dict[str, str] | None = None
    reserved: bool = True


def matches(expected: Any, found: Any) -> bool:
    """Whether a value has the expected form."""
    if expected == "*":
        return not absent(found)
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            matches(value, found.get(name)) for name, value in expected.items()
        )
    if isinstance(expected, list) and expected:
        given = found if isinstance(found, list) else []
        return len(given) == len(expected) and all(map(matches, expected, given))
    return (absent(expected) and absent(found)) or text(expected) == text(found)


def absent(value: Any) -> bool:
    """Whether protobuf's JSON may leave the value out."""
    return value in (None, False, 0, "", "0", [], {})


def text(value: Any) -> str:
    """A scalar as text: 64-bit numbers are strings in protobuf's JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems(rpc: str, expect: Json, outcome: Outcome) -> Iterator[str]:
    """What is wrong with the outcome of a call of `rpc`."""
    yield from _status(expect, outcome)
    yield from _metadata(expect, outcome)
    if rpc in STREAMS:
        yield from Stream(outcome.messages, rpc, ok=outcome.code == "OK").problems(expect)
    elif len(outcome.messages) != (outcome.code == "OK"):
        yield f"{len(outcome.messages)} messages came with {outcome.code}"
    yield from _in_order(expect.get("messages", []), outcome.messages)


def _status(expect: Json, outcome: Outcome) -> Iterator[str]:
    code = expect.get("code", "OK")
    if outcome.code != code:
        yield f"code is {outcome.code}, not {code} ({outcome.reason} {outcome.message})"
    if "says" in expect and expect["says"] not in outcome.message:
        yield f"message is {outcome.message!r}, it does not say {expect['says']!r}"
    if "reason" not in expect:
        return
    if outcome.reason != expect["reason"]:
        yield f"reason is {outcome.reason!r}, not {expect['reason']!r}"
    if expect["reason"] and outcome.domain != DOMAIN:
        yield f"domain is {outcome.domain!r}"
    if sorted(outcome.fields) != sorted(expect.get("fields", [])):
        yield f"fields are {outcome.fields}, not {expect.get('fields', [])}"
    if bool(outcome.retry_ms) != expect.get("retry", False):
        yield f"retry is {outcome.retry_ms} ms"
    if outcome.trailers is not None and outcome.reserved:
        pushback = outcome.trailers.get("grpc-retry-pushback-ms")
        if pushback != (None if outcome.retry_ms is None else str(outcome.retry_ms)):
            yield f"the pushback is {pushback}, RetryInfo says {outcome.retry_ms}"


def _metadata(expect: Json, outcome: Outcome) -> Iterator[str]:
    for kind, found in (("headers", outcome.headers), ("trailers", outcome.trailers)):
        if found is not None and not matches(expect.get(kind, {}), found):
            yield f"{kind} are {found}, not {expect[kind]}"


def _in_order(expected: Sequence[Any], messages: Sequence[Json]) -> Iterator[str]:
    rest = iter(messages)
    for wanted in expected:
        if not any(matches(wanted, message) for message in rest):
            yield f"no message (behind those found before) is {wanted}"
            return


def kind_of(message: Json) -> str:
    """What a message of a stream is: its event, or the kind of a session's notice."""
    event: Json = message.get("response", message)
    return next(name for name in event if name not in ("seq", "epoch"))


class Stream:
    """The events of a request, and what holds for every such stream."""

    def __init__(self, messages: list[Json], rpc: str, *, ok: bool) -> None:
        self._rpc, self._ok = rpc, ok
        self._kinds = [kind_of(message) for message in messages]
        self._events = [
            message.get("response", message)
            for message in messages
            if rpc == "AddRequest" or "response" in message
        ]

    def problems(self, expect: Json) -> Iterator[str]:
        """What breaks the contract's order, and what is not as expected."""
        yield from self._order()
        yield from self._contiguous()
        kinds = [kind for n, kind in enumerate(self._kinds) if self._kinds[n - 1 : n] != [kind]]
        if "kinds" in expect and kinds != expect["kinds"]:
            yield f"kinds are {kinds}, not {expect['kinds']}"
        newest = self._events[-1].get("epoch", 0) if self._events else 0
        texts: defaultdict[str, str] = defaultdict(str)
        sizes: defaultdict[str, int] = defaultdict(int)
        for event in self._events:
            if event.get("epoch", 0) == newest and "output" in event:
                output = event["output"]
                texts[output["stage"]] += output.get("text", {}).get("text", "")
                sizes[output["stage"]] += size_of(output)
        for stage, wanted in expect.get("text", {}).items():
            if texts[stage] != wanted:
                yield f"text of {stage} is {texts[stage]!r}, not {wanted!r}"
        for stage, size in expect.get("bytes", {}).items():
            if sizes[stage] != size:
                yield f"{stage} gave {sizes[stage]} bytes, not {size}"

    def _order(self) -> Iterator[str]:
        seqs = [int(event.get("seq", 0)) for event in self._events]
        if any(later != earlier + 1 for earlier, later in pairwise(seqs)):
            yield f"seq has a gap: {seqs}"
        if "accepted" in self._kinds and seqs[0] != 0:
            yield f"seq begins with {seqs[0]}"
        if self._rpc == "AddRequest" and self._kinds and self._kinds[0] != "accepted":
            yield f"the first event is {self._kinds[0]}"
        if self._kinds.count("accepted") > 1:
            yield "accepted came twice"
        finished = [n for n, kind in enumerate(self._kinds) if kind == "finished"]
        if self._rpc == "AddRequest" and finished != [len(self._kinds) - 1] * self._ok:
            yield f"finished came at {finished} of {len(self._kinds)}"
        epochs = [event.get("epoch", 0) for event in self._events]
        if epochs != sorted(epochs):
            yield f"the epoch falls: {epochs}"

    def _contiguous(self) -> Iterator[str]:
        next_sample: dict[str, int] = {}
        next_offset: defaultdict[tuple[str, int], int] = defaultdict(int)
        for event in self._events:
            output = event.get("output", {})
            size, stage = size_of(output), output.get("stage", "")
            if size > (MAX_AUDIO if "audio" in output else MAX_MESSAGE):
                yield f"an output of {stage} has {size} bytes"
            if "audio" in output:
                start = int(output["audio"].get("startSample", 0))
                if start != next_sample.get(stage, start):
                    yield f"start_sample is {start}, not {next_sample[stage]}"
                next_sample[stage] = start + size // BYTES_PER_SAMPLE
            if "image" in output:
                key = (stage, event.get("epoch", 0))
                if int(output["image"].get("offset", 0)) != next_offset[key]:
                    yield f"offset is {output['image'].get('offset', 0)}, not {next_offset[key]}"
                next_offset[key] = 0 if output["image"].get("last") else next_offset[key] + size


def size_of(output: Json) -> int:
    """Bytes of sound or picture in an output."""
    part: Json = output.get("audio") or output.get("image") or {}
    return len(base64.b64decode(part.get("data", "")))
