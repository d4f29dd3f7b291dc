"""The ledger alone: each event has one end, and one that hears of it."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_grpc import ledger as ledger_module
from omni_grpc.errors import InvalidField, NotSupported
from omni_grpc.ledger import MAX_PENDING, Ledger
from omni_grpc.types import EventChange, EventState, InteractionEvent, Media, Modality

QUEUED, REJECTED, EXPIRED = EventState.QUEUED, EventState.REJECTED, EventState.EXPIRED
STARTED, COMPLETED, SUPERSEDED = EventState.STARTED, EventState.COMPLETED, EventState.SUPERSEDED


def event(event_id: str = "e", prompt: str | None = "blue", **fields: Any) -> InteractionEvent:
    """An event that changes the prompt."""
    return InteractionEvent(event_id, prompt, **fields)


def submit(ledger: Ledger, one: InteractionEvent, listener: Any = "me") -> tuple[Any, ...]:
    """(state, whether it answers a repeated one, the error's reason, whether it goes on)."""
    notice, goes_on = ledger.submit(one, listener, None)
    reason = notice.change.error.reason if notice.change.error is not None else None
    return notice.change.state, notice.resubmission, reason, goes_on


def test_an_event_is_queued_and_goes_to_the_stage() -> None:
    assert submit(Ledger(), event()) == (QUEUED, False, None, True)


def test_the_same_again_is_answered_with_what_became_of_it() -> None:
    ledger = Ledger()
    submit(ledger, event())
    for state in (QUEUED, STARTED, COMPLETED):
        ledger.changed(EventChange("e", state, 1))
        assert submit(ledger, event(), "you") == (state, True, None, False)


def test_the_order_of_keys_does_not_make_another_payload() -> None:
    ledger = Ledger()
    submit(ledger, event(parameters={"a": 1, "b": {"x": 1, "y": 2}}))
    again = event(parameters={"b": {"y": 2, "x": 1}, "a": 1})
    assert submit(ledger, again) == (QUEUED, True, None, False)


def test_another_payload_is_a_conflict_and_leaves_the_first() -> None:
    ledger = Ledger()
    submit(ledger, event())
    media = (Media(Modality.IMAGE, data=b"x"),)
    others: list[dict[str, Any]] = [
        {"prompt": "green"},
        {"prompt": None, "negative_prompt": "blue"},
        {"media": media},
        {"parameters": {}},
        {"transition_chunks": 0},
    ]
    for other in others:
        assert submit(ledger, event(**other)) == (REJECTED, True, "EVENT_ID_CONFLICT", False)
    assert submit(ledger, event()) == (QUEUED, True, None, False)
    assert ledger.changed(EventChange("e", COMPLETED, 0)) == (True, "me")


def test_an_event_must_change_something() -> None:
    assert submit(Ledger(), event(prompt=None)) == (REJECTED, False, "INVALID_FIELD", False)
    changes: list[dict[str, Any]] = [{"prompt": ""}, {"negative_prompt": ""}, {"parameters": {}}]
    for change in changes:
        fields: dict[str, Any] = {"prompt": None, **change}
        assert submit(Ledger(), event(**fields))[0] is QUEUED


def test_what_is_wrong_beforehand_rejects_it() -> None:
    ledger = Ledger()
    notice, goes_on = ledger.submit(event(), None, NotSupported("no"))
    assert (notice.change.state, goes_on) == (REJECTED, False)
    # That is its end: the same again hears it, another is another.
    assert submit(ledger, event()) == (REJECTED, True, "NOT_SUPPORTED", False)
    notice, _ = ledger.submit(event("f"), None, InvalidField("event.media[0]", "is bad"))
    assert notice.change.error is not None
    assert notice.change.error.violations[0].field == "event.media[0]"


def test_only_so_many_may_wait() -> None:
    ledger = Ledger()
    for number in range(MAX_PENDING):
        submit(ledger, event(f"e{number}"))
    assert submit(ledger, event("more")) == (REJECTED, False, "QUEUE_FULL", False)
    ledger.changed(EventChange("e0", STARTED, 0))
    assert submit(ledger, event("more2"))[0] is REJECTED
    ledger.changed(EventChange("e0", SUPERSEDED, 1))
    assert submit(ledger, event("more3"))[0] is QUEUED


def test_after_a_terminal_state_nothing_is_news() -> None:
    ledger = Ledger()
    submit(ledger, event())
    assert ledger.changed(EventChange("e", COMPLETED, 3)) == (True, "me")
    for state in EventState:
        assert ledger.changed(EventChange("e", state)) == (False, None)
    assert ledger.changed(EventChange("unknown", STARTED)) == (False, None)


def test_the_end_expires_what_waits_and_takes_no_more() -> None:
    ledger = Ledger()
    for event_id in ("a", "b", "c"):
        submit(ledger, event(event_id), event_id.upper())
    ledger.changed(EventChange("b", COMPLETED, 0))
    assert ledger.close() == [
        ("A", EventChange("a", EXPIRED)),
        ("C", EventChange("c", EXPIRED)),
    ]
    assert ledger.close() == []
    assert submit(ledger, event("d")) == (REJECTED, False, "NOT_SUPPORTED", False)


def test_what_was_steered_may_end_before_the_request() -> None:
    ledger = Ledger()
    for number in range(MAX_PENDING):
        submit(ledger, event(f"e{number}"))
    assert len(ledger.expire()) == MAX_PENDING
    assert submit(ledger, event("next"))[0] is QUEUED


def test_memory_is_bounded_whatever_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(ledger_module, "REMEMBERED", 100)
    ledger = Ledger()
    submit(ledger, event("first"))
    for number in range(1000):
        submit(ledger, event(f"e{number}", prompt=None))
    assert len(ledger._records) <= 100
    assert ledger.changed(EventChange("first", COMPLETED, 0)) == (True, "me")
    assert submit(ledger, event("e999", prompt=None))[1]


NAMES = st.sampled_from([f"e{n}" for n in range(12)])


class LedgerMachine(RuleBasedStateMachine):
    """Events, what becomes of them, and ends, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.states: dict[str, list[EventState]] = {}
        self.payloads: dict[str, str] = {}
        self.closed = False

    def note(self, event_id: str, state: EventState) -> None:
        before = self.states.setdefault(event_id, [])
        assert not any(s.terminal for s in before), (event_id, before, state)
        before.append(state)

    @rule(event_id=NAMES, prompt=st.sampled_from(["red", "blue", ""]))
    def an_event_comes(self, event_id: str, prompt: str) -> None:
        notice, goes_on = self.ledger.submit(event(event_id, prompt), event_id, None)
        known = self.payloads.get(event_id)
        assert notice.resubmission == (known is not None)
        assert goes_on == (known is None and not self.closed)
        if known is None:
            self.payloads[event_id] = prompt
            self.note(event_id, notice.change.state)
        elif known == prompt:
            assert notice.change.state is self.states[event_id][-1]
        else:
            assert notice.change.state is REJECTED

    @rule(event_id=NAMES, state=st.sampled_from([s for s in EventState if s is not QUEUED]))
    def the_stage_says(self, event_id: str, state: EventState) -> None:
        news, listener = self.ledger.changed(EventChange(event_id, state))
        waits = event_id in self.states and not self.states[event_id][-1].terminal
        assert (news, listener) == ((True, event_id) if waits else (False, None))
        if news:
            self.note(event_id, state)

    @rule()
    def what_was_steered_ends(self) -> None:
        for listener, change in self.ledger.expire():
            assert listener == change.event_id
            self.note(change.event_id, change.state)
        assert all(states[-1].terminal for states in self.states.values())

    @precondition(lambda self: len(self.states) > 6)
    @rule()
    def the_request_ends(self) -> None:
        for _, change in self.ledger.close():
            self.note(change.event_id, change.state)
        self.closed = True

    @invariant()
    def what_waits_is_counted(self) -> None:
        waiting = sum(not states[-1].terminal for states in self.states.values())
        assert self.ledger._pending == waiting
        assert not (self.closed and waiting)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
