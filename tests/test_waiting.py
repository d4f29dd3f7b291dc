"""The line before a stage that has no place free: who waits, who is next, and how one leaves."""

from __future__ import annotations

from omni_grpc.waiting import Line


def drained(line: Line[str]) -> list[str]:
    """Everybody, in turn."""
    return [line.take() for _ in range(len(line))]


def test_each_tenant_has_its_turn() -> None:
    line: Line[str] = Line()
    for waiter in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
        line.add(waiter, tenant=waiter[0], running=False)
    assert line.first() == "a1"
    assert drained(line) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert line.first() is None


def test_a_tenant_that_comes_late_does_not_wait_for_all_of_another() -> None:
    line: Line[str] = Line()
    for waiter in ("a1", "a2", "a3"):
        line.add(waiter, "a", running=False)
    assert line.take() == "a1"
    line.add("b1", "b", running=False)
    assert drained(line) == ["a2", "b1", "a3"]


def test_what_runs_goes_first() -> None:
    line: Line[str] = Line()
    line.add("new", "a", running=False)
    line.add("first", "a", running=True)
    line.add("second", "b", running=True)
    assert (len(line), line.new) == (3, 1)
    assert drained(line) == ["first", "second", "new"]


def test_one_may_leave_from_anywhere() -> None:
    line: Line[str] = Line()
    for waiter in ("a1", "a2", "b1", "r1"):
        line.add(waiter, tenant=waiter[0], running=waiter == "r1")
    for waiter in ("a2", "r1", "b1", "nobody"):
        line.remove(waiter)
        assert waiter not in line
    assert list(line) == ["a1"]
    assert drained(line) == ["a1"]
    assert len(line) == line.new == 0
