"""The conformance list, through gRPC's C core, grpclib, grpcurl and `buf curl`.

The clients in other languages have runners of their own: test_clients_*.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from omni_grpc.errors import OmniError
from tests.conformance.check import Json
from tests.conformance.grpcio_peer import GrpcioPeer
from tests.conformance.grpclib_peer import GrpclibPeer
from tests.conformance.liar import Liar
from tests.conformance.run import LIST, WRONG, read_cases, run_case
from tests.conformance.tool_peers import BUF, GRPCURL, ToolPeer, reachable

CASES = read_cases(LIST)
REACHABLE = [case for case in CASES if reachable(case)]
PEERS: dict[str, Callable[[str], Any]] = {
    "grpcio": GrpcioPeer,
    "grpclib": GrpclibPeer,
    "grpcurl": lambda address: ToolPeer(address, GRPCURL),
    "buf": lambda address: ToolPeer(address, BUF),
}
RUNS = [
    (name, case)
    for name in PEERS
    for case in (REACHABLE if name in ("grpcurl", "buf") else CASES)
    if name not in case.get("unfit", {})
]


@pytest.fixture(scope="module")
def peers(conformance_address: str) -> Iterator[dict[str, Any]]:
    """A peer of each kind, connected."""
    made = {name: make(conformance_address) for name, make in PEERS.items()}
    yield made
    for peer in made.values():
        peer.close()


@pytest.mark.parametrize(("name", "case"), RUNS, ids=[f"{n}-{c['name']}" for n, c in RUNS])
def test_the_list(peers: dict[str, Any], name: str, case: Json) -> None:
    assert run_case(peers[name], case) == []


def test_the_list_is_large_and_no_name_comes_twice() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) > 60
    assert len(REACHABLE) > 30


def reasons(value: Any) -> set[str]:
    """All reasons of errors that a case expects."""
    if isinstance(value, list):
        return set().union(*map(reasons, value))
    if isinstance(value, dict):
        own = {value["reason"]} if isinstance(value.get("reason"), str) else set()
        return own.union(*map(reasons, value.values()))
    return set()


def test_the_list_shows_every_reason_that_fake_stages_can_show() -> None:
    # Their causes are a tokenizer, media, settings of the server, a client's slowness, its end.
    hidden = "PROMPT_TOO_LONG INVALID_MEDIA MEDIA_SOURCE MEDIA_BUDGET TENANT_BUDGET SLOW_CONSUMER"
    hidden += " DRAINING UNAUTHENTICATED PERMISSION_DENIED NOT_IMPLEMENTED INTERNAL"
    shown = {reason for reason in reasons(CASES) if not reason.startswith("FINISH_REASON")}
    assert shown - {""} == set(OmniError.by_reason) - set(hidden.split())


@pytest.fixture(scope="module")
def liar() -> Iterator[Any]:
    """A client of a server that says what it is told to say."""
    with Liar() as server, closing(GrpcioPeer(server.address)) as peer:
        yield peer


@pytest.mark.parametrize("case", read_cases(WRONG), ids=lambda case: case["name"])
def test_what_is_wrong_is_noticed(liar: GrpcioPeer, case: Json) -> None:
    found = run_case(liar, case)
    assert found == [] if case.get("right") else len(found) >= 1, found
