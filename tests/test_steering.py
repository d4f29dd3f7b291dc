"""What becomes of events at chunk borders: `Track` against a model of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_grpc.stages.steering import Blend, Steering, Track
from omni_grpc.types import EventChange, EventState

QUEUED, REJECTED, SUPERSEDED, EXPIRED, STARTED, COMPLETED = (
    EventState.QUEUED,
    EventState.REJECTED,
    EventState.SUPERSEDED,
    EventState.EXPIRED,
    EventState.STARTED,
    EventState.COMPLETED,
)
START = 100.0
"""What is shown before any event."""


def shown(blend: Blend[float]) -> float:
    """What a chunk shows, where targets are numbers."""
    return blend.base + blend.weight * (blend.target - blend.base)


def states(changes: list[EventChange]) -> list[tuple[str, EventState, int | None]]:
    """(event, state, chunk) of each."""
    return [(change.event_id, change.state, change.chunk) for change in changes]


@dataclass
class Life:
    """An event as the model knows it."""

    target: float
    chunks: int
    """How many chunks it takes until it is whole."""
    states: list[EventState]
    began: int | None = None


class Generation(RuleBasedStateMachine):
    """Events and borders in any order, and at some time the end."""

    def __init__(self) -> None:
        super().__init__()
        self.track = Track(START)
        self.lives: dict[str, Life] = {}
        self.chunk = 0
        self.value = START
        self.whole: str | None = None
        """The event that was completed last."""
        self.ended = False

    def in_state(self, state: EventState) -> list[str]:
        return [name for name, life in self.lives.items() if life.states[-1] is state]

    def note(self, changes: list[EventChange]) -> None:
        for change in changes:
            life = self.lives[change.event_id]
            assert not life.states[-1].terminal, "a terminal state is the last"
            allowed = {QUEUED: {SUPERSEDED, EXPIRED, STARTED}, STARTED: {COMPLETED, SUPERSEDED}}
            allowed[STARTED] |= {EXPIRED}
            assert change.state in allowed[life.states[-1]]
            life.states.append(change.state)

    @rule(aim=st.integers(0, 9), transition=st.sampled_from([0, 1, 2, 3, 7]))
    def submit(self, aim: int, transition: int) -> None:
        name = f"e{len(self.lives)}"
        waiting = self.in_state(QUEUED)
        self.lives[name] = Life(float(aim), max(1, transition), [QUEUED])
        changes = self.track.submit(Steering(name, float(aim), transition))
        if self.ended:
            assert states(changes) == [(name, EXPIRED, None)]
        else:
            assert states(changes) == [(old, SUPERSEDED, None) for old in waiting]
        self.note(changes)

    @precondition(lambda self: not self.ended)
    @rule()
    def border(self) -> None:
        waiting, blending = self.in_state(QUEUED), self.in_state(STARTED)
        blend, changes = self.track.border(self.chunk, self.value)
        self.note(changes)
        expected: list[tuple[str, EventState, int | None]] = []
        if waiting:
            expected += [(old, SUPERSEDED, self.chunk) for old in blending]
            expected += [(waiting[0], STARTED, self.chunk)]
            self.lives[waiting[0]].began = self.chunk
            assert blend.base == self.value, "it is blended in from what was shown"
        present = waiting or blending
        self.check_blend(present[0] if present else None, blend)
        if present and blend.weight == 1:
            expected.append((present[0], COMPLETED, self.chunk))
            self.whole = present[0]
        assert states(changes) == expected
        self.value = shown(blend)
        self.chunk += 1

    def check_blend(self, present: str | None, blend: Blend[float]) -> None:
        """`present` is the event that is being blended in."""
        before = (self.whole,) if self.whole is not None else ()
        if present is None:
            assert (shown(blend), blend.weight, blend.active) == (self.value, 1.0, before)
            return
        life = self.lives[present]
        assert life.began is not None
        done = self.chunk - life.began + 1
        assert blend.target == life.target
        assert blend.weight == pytest.approx(done / life.chunks)
        assert done <= life.chunks, "it takes no longer than it was given"
        whole = done == life.chunks
        assert blend.weight == 1 if whole else 0 < blend.weight < 1
        assert blend.active == ((present,) if whole else (*before, present))
        distances = abs(life.target - shown(blend)), abs(life.target - self.value)
        assert distances[0] <= distances[1], "each chunk is nearer to it"

    @precondition(lambda self: self.chunk > 12)
    @rule()
    def end(self) -> None:
        left = [*self.in_state(STARTED), *self.in_state(QUEUED)]
        changes = self.track.end()
        assert states(changes) == [(name, EXPIRED, None) for name in left]
        self.note(changes)
        self.ended = True

    @invariant()
    def few_are_under_way(self) -> None:
        assert len(self.in_state(QUEUED)) <= 1 and len(self.in_state(STARTED)) <= 1
        if self.ended:
            assert all(life.states[-1].terminal for life in self.lives.values())

    def teardown(self) -> None:
        self.end()
        self.few_are_under_way()


TestGeneration = Generation.TestCase
TestGeneration.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("transition", "weights"), [(0, [1]), (1, [1]), (3, [1 / 3, 2 / 3, 1])])
def test_a_transition_takes_as_many_chunks_as_it_says(
    transition: int, weights: list[float]
) -> None:
    track = Track("red")
    track.submit(Steering("e", "blue", transition))
    blends, changes = zip(*(track.border(n, "red") for n in range(len(weights))), strict=True)
    assert [blend.weight for blend in blends] == pytest.approx(weights)
    assert states([c for part in changes for c in part]) == [
        ("e", STARTED, 0),
        ("e", COMPLETED, len(weights) - 1),
    ]
    after, none = track.border(len(weights), "blue")
    assert (after.base, after.target, after.weight, after.active) == ("blue", "blue", 1, ("e",))
    assert not none


def test_what_is_superseded_half_way_is_in_force_no_more() -> None:
    track = Track("red")
    for chunk, event in enumerate(["old", "lost", "new"]):
        track.submit(Steering(event, event, 0 if event == "old" else 3))
        blend, changes = track.border(chunk, "mixed")
    assert states(changes) == [("lost", SUPERSEDED, 2), ("new", STARTED, 2)]
    assert (blend.base, blend.active) == ("mixed", ("old", "new"))
