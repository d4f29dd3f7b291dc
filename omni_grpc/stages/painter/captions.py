"""The captions that the painter draws: "a large red circle on a white background"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

__all__ = [
    "CAPTIONS",
    "EBNF",
    "HELD_OUT",
    "REGEX",
    "Background",
    "Caption",
    "Colour",
    "Shape",
    "Size",
    "parse",
    "parse_optional",
]


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"
    YELLOW = "yellow"
    PURPLE = "purple"
    ORANGE = "orange"


class Shape(StrEnum):
    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"
    RING = "ring"
    CROSS = "cross"
    DIAMOND = "diamond"


class Background(StrEnum):
    WHITE = "white"
    BLACK = "black"
    GRAY = "gray"


@dataclass(frozen=True, slots=True)
class Caption:
    """One picture's four attributes; `str()` of it is its text in the grammar."""

    size: Size
    colour: Colour
    shape: Shape
    background: Background

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} on a {self.background} background"

    def __iter__(self) -> Iterator[StrEnum]:
        """The attributes in the order of the fields."""
        return iter((self.size, self.colour, self.shape, self.background))


CAPTIONS: tuple[Caption, ...] = tuple(
    Caption(*attributes) for attributes in product(Size, Colour, Shape, Background)
)
"""All 216, the last attribute changing fastest: a caption's place here is its index."""

HELD_OUT: tuple[Caption, ...] = CAPTIONS[5::11]
"""The 20 that training never saw. 11 shares no factor with 2, 6 or 3, so they spread evenly:
every shape in every size loses one or two of its 18 combinations, and no pair of words is new."""


def _either(words: type[StrEnum]) -> str:
    return "|".join(words)


def _rule(words: type[StrEnum]) -> str:
    return f"{words.__name__.lower()} ::= " + " | ".join(f'"{word}"' for word in words)


REGEX = (
    f"a ({_either(Size)}) ({_either(Colour)}) ({_either(Shape)})"
    f" on a ({_either(Background)}) background"
)
"""Matches a caption's text from end to end: for structured output by regular expression."""

EBNF = "\n".join(
    [
        'root ::= "a " size " " colour " " shape " on a " background " background"',
        *(_rule(words) for words in (Size, Colour, Shape, Background)),
    ]
)
"""The same in the notation of xgrammar and llama.cpp, whose start symbol is `root`."""

_WORDS: tuple[tuple[str, ...], ...] = (
    ("a",),
    tuple(Size),
    tuple(Colour),
    tuple(Shape),
    ("on",),
    ("a",),
    tuple(Background),
    ("background",),
)


def parse(text: str) -> Caption:
    """The caption that `text` states. Case, white space around words and a final full stop don't
    matter. Raises ValueError that names the first word that is wrong and what may stand there."""
    words = text.strip().removesuffix(".").lower().split()
    for number, allowed in enumerate(_WORDS):
        if number == len(words):
            raise ValueError(f"the caption ends where {_wanted(allowed)} must follow")
        if words[number] not in allowed:
            raise ValueError(
                f"word {number + 1} of the caption must be {_wanted(allowed)}, "
                f"not {_shortened(words[number])}"
            )
    if len(words) > len(_WORDS):
        raise ValueError(f"the caption goes on with {_shortened(words[len(_WORDS)])} after its end")
    return Caption(Size(words[1]), Colour(words[2]), Shape(words[3]), Background(words[6]))


def parse_optional(text: str) -> Caption | None:
    """`parse`, with None for an empty or blank text: the unconditional picture."""
    return parse(text) if text.strip() else None


def _wanted(words: tuple[str, ...]) -> str:
    quoted = [f'"{word}"' for word in words]
    return quoted[0] if len(quoted) == 1 else "one of " + ", ".join(quoted)


def _shortened(word: str, limit: int = 40) -> str:
    return repr(word if len(word) <= limit else word[:limit] + "…")
