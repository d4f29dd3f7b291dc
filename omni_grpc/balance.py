"""Which replica takes the next task. The default is least work, not fewest tasks: one long answer
weighs more than ten short ones.

Work is counted in what a stage's engine makes (tokens, denoise steps, clauses), as the replica's
last heartbeat tells it, plus what was sent to it since. A replica that tells nothing is judged by
what it was sent and has not ended."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar

from omni_grpc.types import (
    CodecParams,
    DiffusionParams,
    Messages,
    Params,
    Prompt,
    SamplingParams,
    Tensor,
    Text,
    TokenIds,
)

Policy = Literal["least-work", "round-robin", "random"]

UNKNOWN_TOKENS = 256
"""What an answer without `max_tokens` is taken to be."""
CHARACTERS_PER_TOKEN = 4
PREFILL_WEIGHT = 0.1
"""A token of the prompt beside one of the answer: prefill is parallel, decode is not."""
UNKNOWN_STEPS = 20


class Candidate(Protocol):
    """A replica, as far as balancing sees it."""

    @property
    def work(self) -> float:
        """Work that is left in it."""


Chosen = TypeVar("Chosen", bound=Candidate)


class Balancer:
    """Picks replicas by one policy. Not shared between pools: round-robin counts."""

    def __init__(self, policy: Policy, seed: int | None = None) -> None:
        self._policy = policy
        self._turn = 0
        self._random = random.Random(seed)

    def pick(self, candidates: Sequence[Chosen]) -> Chosen:
        """One of the candidates, of which there is at least one. Of equals, each has its turn."""
        self._turn += 1
        match self._policy:
            case "round-robin":
                return candidates[self._turn % len(candidates)]
            case "random":
                return self._random.choice(candidates)
        least = min(candidate.work for candidate in candidates)
        equals = [candidate for candidate in candidates if candidate.work <= least]
        return equals[self._turn % len(equals)]


def estimate(params: Params | None, prompt: Prompt | None) -> float:
    """The work of a task, in its engine's own units, before it has begun."""
    match params:
        case SamplingParams():
            return PREFILL_WEIGHT * _prompt_tokens(prompt) + _answer_tokens(params)
        case DiffusionParams():
            return float((params.steps or UNKNOWN_STEPS) * (params.frames or 1))
        case CodecParams():
            return 1.0 + _prompt_tokens(prompt)
    return 1.0


def tokens(prompt: Prompt, answers: Iterable[Params]) -> int:
    """The tokens that a request may come to: its prompt's, and those of the answers that stages
    with these parameters may give."""
    answered = sum(_answer_tokens(one) for one in answers if isinstance(one, SamplingParams))
    return math.ceil(_prompt_tokens(prompt)) + answered


def _answer_tokens(params: SamplingParams) -> int:
    longest = params.max_tokens if params.max_tokens is not None else UNKNOWN_TOKENS
    return longest * (params.n or 1)


def _prompt_tokens(prompt: Prompt | None) -> float:
    match prompt.content if prompt is not None else None:
        case Text(text):
            return len(text) / CHARACTERS_PER_TOKEN
        case TokenIds(ids):
            return float(len(ids))
        case Messages(messages):
            parts = (part for message in messages for part in message.parts)
            characters = sum(len(part.text) for part in parts if isinstance(part, Text))
            return characters / CHARACTERS_PER_TOKEN
        case Tensor(shape=shape):
            return float(shape[0]) if shape else 0.0
    return 0.0
