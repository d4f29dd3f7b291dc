"""The transform of `smol-shapes`: a free sentence becomes a request for the painter's caption."""

from __future__ import annotations

import re

from omni_grpc.errors import NotSupported
from omni_grpc.pipelines.transforms import TransformContext, Transformed
from omni_grpc.types import Message, Messages, Prompt, Text

INSTRUCTION = (
    "Rewrite the wish as: a SIZE COLOR SHAPE on a BACKGROUND background. Keep its size, color, "
    "shape and background."
)
EXAMPLES = (
    ("draw me a big red ball on something dark", "a large red circle on a black background"),
    ("a tiny blue box, please, on white paper", "a small blue square on a white background"),
    ("huge golden rhombus against grey", "a large yellow diamond on a gray background"),
    ("I want a little violet plus sign on snow", "a small purple cross on a white background"),
    ("big green donut at night", "a large green ring on a black background"),
    ("mini orange pyramid on concrete", "a small orange triangle on a gray background"),
)
"""Small models follow examples better than instructions. Every word of the grammar stands here."""

SHAPES = {
    "circle": ("circle", "ball", "disc", "disk", "dot", "round"),
    "square": ("square", "box", "block", "cube"),
    "triangle": ("triangle", "pyramid", "arrow"),
    "ring": ("ring", "donut", "doughnut", "hoop"),
    "cross": ("cross", "plus"),
    "diamond": ("diamond", "rhombus", "kite"),
}
COLOURS = {
    "red": ("red", "crimson"),
    "green": ("green",),
    "blue": ("blue",),
    "yellow": ("yellow", "golden", "gold"),
    "purple": ("purple", "violet"),
    "orange": ("orange",),
}


def ask_for_caption(prompt: Prompt, context: TransformContext) -> Transformed:
    """The sentence as the last turn of a conversation whose earlier turns show what is wanted.

    The turns before it use its own words for shape and colour, if they are known, so that a model
    which copies copies the right ones.
    """
    if not isinstance(prompt.content, Text):
        raise NotSupported("only text can be drawn")
    wish = prompt.content.text
    turns = [_message("system", INSTRUCTION)]
    for said, caption in _alike(wish) or EXAMPLES:
        turns += [_message("user", said), _message("assistant", caption)]
    turns.append(_message("user", wish))
    return Transformed(Prompt(Messages(tuple(turns))))


def _alike(wish: str) -> list[tuple[str, str]]:
    """Examples in the wish's own words for shape and colour, with other sizes and backgrounds."""
    words = re.findall(r"[a-z]+", wish.lower())
    shape = _found(words, SHAPES)
    colour = _found(words, COLOURS)
    if shape is None or colour is None:
        return []
    (said_shape, shape_name), (said_colour, colour_name) = shape, colour
    return [
        (
            f"a big {said_colour} {said_shape}",
            f"a large {colour_name} {shape_name} on a white background",
        ),
        (
            f"a small {said_colour} {said_shape} on black",
            f"a small {colour_name} {shape_name} on a black background",
        ),
        (
            f"large {said_colour} {said_shape}, gray",
            f"a large {colour_name} {shape_name} on a gray background",
        ),
    ]


def _found(words: list[str], names: dict[str, tuple[str, ...]]) -> tuple[str, str] | None:
    """The first of `words` that means one of `names`, and which one."""
    for word in words:
        for name, synonyms in names.items():
            if word in synonyms or word.removesuffix("s") in synonyms:
                return word, name
    return None


def _message(role: str, text: str) -> Message:
    return Message(role, (Text(text),))
