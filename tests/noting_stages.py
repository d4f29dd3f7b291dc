"""A fake stage that writes down which requests it was given, and when: what a stage has seen."""

from __future__ import annotations

from pathlib import Path

from omni_grpc.ipc import Task
from omni_grpc.stages.fake import FakeJob, FakeStage


class Noting(FakeStage):
    """Engine argument `notes`: the file, one line a request."""

    async def prepare(self, task: Task) -> FakeJob:
        note(Path(self.spec.engine_args["notes"]), task)
        return await super().prepare(task)


def note(notes: Path, task: Task) -> None:
    """Writes a request down, with the seconds that it has left."""
    with notes.open("a") as file:
        file.write(f"{task.request_id} {task.timeout_s:.3f}\n")


def seen(notes: Path) -> list[str]:
    """The ids of the requests that a stage has seen, in order."""
    return [line.split()[0] for line in notes.read_text().splitlines()] if notes.exists() else []


def time_left(notes: Path, request_id: str) -> float:
    """How many seconds a request had left when the stage saw it."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    return next(float(left) for seen_id, left in lines if seen_id == request_id)
