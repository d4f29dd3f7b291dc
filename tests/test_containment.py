"""A fault in any part of the server that handles a request ends that request, and nothing else.

Faults in stages, bridges and transforms that users bring have tests of their own (test_errors.py,
test_transforms.py, test_companions.py). Here the server's own parts break, for one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from omni_grpc import run, servicer
from omni_grpc.cutter import Cutter
from omni_grpc.delivery import Delivery
from omni_grpc.outbox import Outbox
from omni_grpc.report import Report
from omni_grpc.routing import Routing
from omni_grpc.server import Server
from omni_grpc.submission import Submission
from omni_grpc.waiting import Places
from omni_grpc.wire.events import EventEncoder
from omni_grpc.writer import Writer
from tests.support import RichError, collect, rich_error, texts

PARTS: dict[str, tuple[Any, str]] = {
    "decoder": (servicer, "decode_request"),
    "transform": (Submission, "transform"),
    "line": (Places, "submit"),
    "task": (Submission, "task"),
    "routing": (Routing, "route"),
    "cutter": (Cutter, "cut"),
    "outbox": (Outbox, "put"),
    "numbering": (Delivery, "_number"),
    "encoder": (EventEncoder, "encode"),
    "writer": (Writer, "write"),
    "report": (Report, "finished"),
    "next event": (run.Run, "next"),
}
"""Where a part is, and which of its functions breaks."""
FAULTS: dict[str, type[BaseException]] = {
    "raises": RuntimeError,
    "leaks a cancellation": asyncio.CancelledError,
}


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any) -> list[str]:
    """The function raises when it is called next, and works again. What it raised is noted."""
    whole: Callable[..., Any] = getattr(owner, name)
    raised: list[str] = []

    def broken(*arguments: Any, **named: Any) -> Any:
        if not raised:
            raised.append(name)
            raise fault("the secret is 4711")
        return whole(*arguments, **named)

    monkeypatch.setattr(owner, name, broken)
    return raised


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", PARTS)
async def test_a_fault_in_a_part_ends_one_request(
    stub: Any, echo_server: Server, monkeypatch: pytest.MonkeyPatch, part: str, fault: str
) -> None:
    raised = break_once(monkeypatch, *PARTS[part], FAULTS[fault])
    outcomes = await asyncio.gather(*(outcome(stub, f"number {n}") for n in range(5)))
    assert raised
    (error,) = [one for one in outcomes if not isinstance(one, str)]
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "4711" not in str(error)
    assert sum(isinstance(one, str) for one in outcomes) == 4
    # The fixture then asserts that nothing of it is left.


async def outcome(stub: Any, text: str) -> str | RichError:
    """What a request says, checked, or how it fails."""
    try:
        said = texts(await collect(stub, text=text))
    except grpc.aio.AioRpcError as error:
        return rich_error(error)
    assert said == text
    return said
