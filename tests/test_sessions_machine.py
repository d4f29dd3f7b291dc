"""Sessions in any order of steps, on fake stages: what must hold of all of them, and after them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import params_pb2
from tests.conftest import Serve
from tests.sessions import TERMINAL, Session, check_order, state_name
from tests.streaming import Feeding, by_segment, chunk, new_id
from tests.support import TEXT, Served, client, echo, freed, script, stub_of

STEPS = 250
"""Of one user."""
USERS = 16
ENDINGS = {"ABORTED_BY_CLIENT", "CANCELLED", "INVALID_FIELD"}


class User:
    """A client that does anything at random on one request after the other, and a model of what
    it may expect."""

    def __init__(self, stub: Any, seed: int) -> None:
        self.stub = stub
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.one: Session | None = None
        self.others: list[Session] = []
        self.resumable = False
        self.ended = True
        """Whether the present request was told to end: its input, or all of it."""
        self.seq = 0
        self.request_id = ""
        self.events = 0

    # ------------------------------------------------------------ steps

    async def run(self, steps: int) -> None:
        """So many steps, then the end of what is open."""
        for _ in range(steps):
            await self.step()
        await self.finish()

    async def step(self) -> None:
        """One of all that is possible now."""
        if self.one is None or self.one.over:
            await self.finish()
            await self.open()
            return
        steps = [self.update, self.update, self.event, self.event, self.event, self.resubmit]
        steps += [self.attach, self.other_event, self.interrupt, self.wait, self.read_slowly]
        if self.random.random() < 0.15:
            steps += [self.abort, self.half_close, self.end_input, self.leave, self.detach]
            steps += [self.bad_event, self.bad_update, self.second_feeder, self.other_interrupt]
        chosen = self.random.choice(steps)
        self.counts[chosen.__name__] += 1
        try:
            await chosen()
        except asyncio.InvalidStateError:
            # The call had ended meanwhile.
            assert self.one is None or any(o.call.done() for o in (self.one, *self.others))
        except Exception as error:
            assert type(error).__name__ in ("UsageError", "AioRpcError"), error

    def script(self) -> list[params_pb2.StageParams]:
        """Some pace, some length."""
        outputs = self.random.choice([1, 3, 10, 200])
        interval = self.random.choice([0, 1, 5])
        return [script(outputs=outputs, interval_ms=interval)]

    async def open(self) -> None:
        self.request_id, self.seq = new_id("machine"), 0
        self.resumable, self.ended = self.random.random() < 0.8, False
        fields: dict[str, Any] = {"request_id": self.request_id, "stage_params": self.script()}
        if self.resumable:
            fields["resumable"] = True
        else:
            fields["prompt"] = {"text": "x y z"}
        if self.random.random() < 0.5:
            fields["output_modalities"] = [TEXT]
        self.one = await Session(self.stub, 60, open=fields).begin()
        await self.one.stands()
        self.counts["open"] += 1

    async def update(self) -> None:
        assert self.one is not None
        if not self.resumable or self.ended:
            return
        end = self.random.random() < 0.6
        await self.one.update(self.seq, f"word{self.seq} ", end=end)
        self.seq += 1

    async def event(self, one: Session | None = None) -> None:
        one = one or self.one
        assert one is not None
        self.events += 1
        parameters = {"encode_ms": self.random.choice([0, 0, 20])}
        transition = self.random.choice([0, 1, 3, 20])
        name = f"e{self.events}"
        await one.event(name, transition_chunks=transition, parameters=parameters)

    async def resubmit(self) -> None:
        assert self.one is not None
        if self.events:
            await self.one.event(f"e{self.random.randint(1, self.events)}", prompt="again")

    async def bad_event(self) -> None:
        assert self.one is not None
        self.events += 1
        await self.one.event(f"e{self.events}", transition_chunks=2**31)

    async def bad_update(self) -> None:
        assert self.one is not None
        await self.one.update(self.seq + 7, "gap", end=True)

    async def other_event(self) -> None:
        if self.others:
            await self.event(self.random.choice(self.others))

    async def attach(self) -> None:
        if len(self.others) < 3:
            attach = {"request_id": self.request_id, "receive_outputs": self.random.random() < 0.5}
            self.others.append(await Session(self.stub, 60, attach=attach).begin())

    async def detach(self) -> None:
        if self.others:
            one = self.others.pop(self.random.randrange(len(self.others)))
            await one.leave()
            self.check(one)

    async def second_feeder(self) -> None:
        feeding = await Feeding(self.stub, self.request_id).send(chunk(self.seq + 100, "x"))
        error = await feeding.refused()
        assert error.reason in (
            "FEEDER_ACTIVE",
            "NOT_RESUMABLE",
            "INVALID_FIELD",
            "REQUEST_NOT_FOUND",
            "ABORTED_BY_CLIENT",
        ), error

    async def interrupt(self) -> None:
        assert self.one is not None
        await self.one.interrupt(self.random.choice([None, 0, 100]))

    async def other_interrupt(self) -> None:
        if self.others:
            await self.random.choice(self.others).interrupt()

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0.002, 0.02]))

    async def read_slowly(self) -> None:
        assert self.one is not None
        self.one.pause()
        await asyncio.sleep(0.01)
        self.one.resume()

    async def abort(self) -> None:
        one = self.random.choice([self.one, *self.others])
        assert one is not None
        self.ended = True
        await one.send(abort={})

    async def end_input(self) -> None:
        assert self.one is not None
        self.ended = True
        await self.one.send(end_input={})

    async def half_close(self) -> None:
        assert self.one is not None
        self.ended = True
        await self.one.half_close()
        # Nothing more can be written here; half of the time it is waited for.
        await self.finish()

    async def leave(self) -> None:
        assert self.one is not None
        self.ended = True
        await self.one.leave()

    # ------------------------------------------------------------ what must hold

    async def finish(self) -> None:
        """Ends the present request in order, and checks all that was heard of it."""
        one, self.one = self.one, None
        others, self.others = self.others, []
        if one is None:
            return
        if not one.over:
            await one.call.done_writing()
            await one.ended(20)
        for other in others:
            await other.ended(5)
        for heard in (one, *others):
            self.check(heard)
        self.events = 0

    def check(self, one: Session) -> None:
        """What holds of each session, whatever was done."""
        attached = "attach" in one._setup
        check_order(one.heard, None if attached else 0)
        if one.error is not None and one.error.reason:
            known = ENDINGS | {"REQUEST_NOT_FOUND"} if attached else ENDINGS
            assert one.error.reason in known, one.error
        left = (one.error is not None and not one.error.reason) or one.call.cancelled()
        by_id: dict[str, list[str]] = {}
        for message in one.heard:
            if message.HasField("event_state"):
                state = message.event_state
                states = by_id.setdefault(state.event_id, [])
                if not state.resubmission:
                    states.append(state_name(state))
        for event_id, states in by_id.items():
            ends = [state for state in states if state in TERMINAL]
            assert len(ends) == (1 if states and not left else len(ends[:1])), (event_id, states)
            assert states[:1] in ([], ["QUEUED"], ["REJECTED"]), (event_id, states)
        self.counts["events"] += len(by_id)
        self.counts["completed"] += sum("COMPLETED" in states for states in by_id.values())
        self.counts["interrupted"] += len(one.interrupts)
        self.counts["segments"] += len(by_segment(one.responses))
        self.counts["finished"] += one.error is None


async def drive(served: Served, seeds: range) -> Counter[str]:
    """All users at once, each on a connection of its own; what they did."""

    async def one(seed: int) -> Counter[str]:
        async with client(served.server) as channel:
            user = User(stub_of(channel), seed)
            try:
                await user.run(STEPS)
            except BaseException as error:
                error.add_note(f"seed {seed}, after {user.counts}")
                raise
            return user.counts

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(seed)) for seed in seeds]
    return sum((task.result() for task in tasks), Counter())


@pytest.mark.timeout(60)
async def test_whatever_sessions_do_what_must_hold_holds(serve: Serve, caplog: Any) -> None:
    served = await serve(echo({"name": "machine"}))
    async with asyncio.timeout(45):
        counts = await drive(served, range(USERS))
    await freed(served.server)
    check_nothing_is_left(served.server)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    # It would show little if little had happened.
    assert sum(counts.values()) > STEPS * USERS
    for name, least in {"events": 300, "completed": 50, "interrupted": 100, "finished": 20}.items():
        assert counts[name] > least, counts


def check_nothing_is_left(server: Server) -> None:
    """Neither requests nor tasks."""
    assert server.engine.orchestrator.statistics() == []
    assert all(slot.load.running == 0 for s in server.engine.load() for slot in s.replicas)
