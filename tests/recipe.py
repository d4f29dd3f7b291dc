"""The image's recipe, read."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

from dockerfile_parse import DockerfileParser

from tests.support import ROOT

DOCKERFILE = ROOT / "Dockerfile"


@cache
def steps() -> tuple[tuple[str, str], ...]:
    """The instructions, in order, with their values."""
    with DOCKERFILE.open("rb") as file:
        structure: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return tuple(
        (step["instruction"], step["value"])
        for step in structure
        if step["instruction"] != "COMMENT"
    )


def values(instruction: str) -> list[str]:
    """The values of all instructions of a kind."""
    return [value for name, value in steps() if name == instruction]


def copies() -> list[tuple[list[str], str]]:
    """What is copied from the context, and where to."""
    whole = [shlex.split(value) for value in values("COPY") if not value.startswith("--from")]
    return [(sources, target) for *sources, target in whole]


def environment() -> dict[str, str]:
    """What the last stage sets."""
    start = max(place for place, (name, _) in enumerate(steps()) if name == "FROM")
    set_there = [value for name, value in steps()[start:] if name == "ENV"]
    return dict(part.split("=", 1) for value in set_there for part in shlex.split(value))
