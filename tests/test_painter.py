"""The painter draws what its captions say, whoever shares the batch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omni_grpc.stages.painter.captions import (
    CAPTIONS,
    EBNF,
    HELD_OUT,
    REGEX,
    Background,
    Caption,
    Colour,
    Shape,
    Size,
    parse,
    parse_optional,
)
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.stages.painter.model import WEIGHTS, Painter, load, word_ids
from omni_grpc.stages.painter.sampler import (
    TOLERANCE,
    initial_noise,
    paint,
    renoise,
    step,
    timesteps,
    to_image,
)
from omni_grpc.stages.painter.shapes import (
    BACKGROUNDS,
    COLOURS,
    RADII,
    cover,
    fill,
    outlines,
    reach,
)
from training.painter.data import Mix, Scenes
from training.painter.evaluate import Scores, score, table

RED_CIRCLE = parse("a large red circle on a white background")
BLUE_SQUARE = parse("a small blue square on a black background")

WORDS = st.sampled_from([*Size, *Colour, *Shape, *Background, "a", "on", "background", "an", "."])
SPACES = st.sampled_from([" ", "  ", "\t", "\n"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Painter:
    return load()


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def rendered(captions: list[Caption], across: Tensor, down: Tensor) -> Tensor:
    """Pictures [n, 3, 32, 32] of the captions; across and down [n], -1 to 1 of their room."""
    size = torch.tensor([list(Size).index(c.size) for c in captions])
    shape = torch.tensor([list(Shape).index(c.shape) for c in captions])
    colour = torch.tensor([list(Colour).index(c.colour) for c in captions])
    background = torch.tensor([list(Background).index(c.background) for c in captions])
    room = reach(RADII[size])
    every = outlines(RADII[size], across * room, down * room)
    mask = cover(every[torch.arange(len(captions)), shape])
    return fill(mask, COLOURS[colour], BACKGROUNDS[background])


# Captions


def test_every_caption_parses_back_and_fits_the_regex() -> None:
    assert len(set(CAPTIONS)) == 216
    for caption in CAPTIONS:
        assert parse(str(caption)) == caption
        assert re.fullmatch(REGEX, str(caption))


def test_the_grammar_names_every_word_once() -> None:
    words = re.findall(r'(?<=[=|] )"(\w+)"', EBNF)
    assert sorted(words) == sorted([*Size, *Colour, *Shape, *Background])


@given(st.sampled_from(CAPTIONS), st.lists(SPACES, min_size=9, max_size=9), st.booleans())
def test_case_blanks_and_a_full_stop_do_not_matter(
    caption: Caption, spaces: list[str], shout: bool
) -> None:
    text = spaces[8] + "".join(map(str.__add__, str(caption).split(), spaces)).rstrip() + "."
    assert parse(text.upper() if shout else text) == caption


@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=12).map(" ".join)))
def test_any_text_is_a_caption_or_a_value_error(text: str) -> None:
    try:
        caption = parse(text)
    except ValueError as error:
        assert 10 < len(str(error)) < 300
    else:
        assert str(caption) == " ".join(text.lower().split()).removesuffix(".").rstrip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", 'the caption ends where "a" must follow'),
        ("a large pink circle on a white background", 'word 3 .* one of "red", .*, not .pink'),
        ("a large red circle", 'ends where "on" must follow'),
        ("a large red circle on a white background please", "goes on with 'please'"),
        ("draw a ball", "word 1 of the caption must be \"a\", not 'draw'"),
        ("a " + "x" * 500, "not 'x{40}…'"),
    ],
)
def test_a_wrong_caption_is_refused_with_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)


def test_a_blank_caption_is_the_unconditional_one() -> None:
    assert parse_optional(" \n") is None
    assert parse_optional(str(RED_CIRCLE)) == RED_CIRCLE


def test_held_out_captions_hide_no_pair_of_words() -> None:
    assert len(HELD_OUT) == 20
    seen = [frozenset(caption) for caption in CAPTIONS if caption not in HELD_OUT]
    for kinds in combinations((Size, Colour, Shape, Background), 2):
        for pair in product(*kinds):
            assert any(words.issuperset(pair) for words in seen)
    assert {(c.size, c.shape) for c in HELD_OUT} == set(product(Size, Shape))


def test_captions_need_no_torch() -> None:
    code = "import sys, omni_grpc.stages.painter.captions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The judge


def test_the_judge_reads_rendered_pictures_anywhere_and_through_noise(judge: Judge) -> None:
    generator = torch.Generator().manual_seed(1)
    across, down = torch.rand(2, len(CAPTIONS), generator=generator) * 2 - 1
    pictures = rendered(list(CAPTIONS), across, down)
    noise = torch.randn(pictures.shape, generator=generator)
    assert judge.read(pictures).captions == list(CAPTIONS)
    assert judge.read(pictures + 0.2 * noise).captions == list(CAPTIONS)


def test_the_judge_measures_the_distance_to_the_template(judge: Judge) -> None:
    corner = torch.full((len(CAPTIONS),), -1.0)  # a centre of the grid
    pictures = rendered(list(CAPTIONS), corner, corner)
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(2)) * 0.02
    assert judge.read(pictures).distance.max() < 2e-3
    torch.testing.assert_close(
        judge.read(pictures + noise).distance,
        noise.square().mean((1, 2, 3)).sqrt(),
        rtol=0.02,
        atol=0,
    )


def test_the_judge_is_far_from_what_is_no_shape(judge: Judge) -> None:
    noise = torch.stack([initial_noise(seed).clamp(-1, 1) for seed in range(8)])
    assert judge.read(noise).distance.min() > 0.5


# Drawing


@pytest.fixture(scope="module")
def scores(model: Painter) -> dict[float, Scores]:
    """Of every caption with one seed and 8 steps, by guidance."""
    return {g: score(model, guidance=g, steps=8, seeds=1, first_seed=500) for g in (1.0, 4.0)}


@pytest.mark.timeout(60)
def test_every_shape_in_both_sizes_is_drawn_as_asked(scores: dict[float, Scores]) -> None:
    report = scores[4.0].report()
    assert report["seen"] >= 0.95
    assert report["held_out"] >= 0.9
    # 16 or 17 pictures each: one wrong is 94 %. The README beside the training script has the
    # rates of ten times as many.
    assert min(report["shapes_seen"].values()) >= 0.85
    assert len(report["shapes_seen"]) == 12


@pytest.mark.timeout(60)
def test_more_guidance_draws_more_of_what_is_asked(scores: dict[float, Scores]) -> None:
    without, guided = scores[1.0].report()["seen"], scores[4.0].report()["seen"]
    assert guided > without + 0.05
    assert without > 0.7  # most, even so


@pytest.mark.timeout(60)
def test_the_evaluation_table_has_a_column_per_setting(scores: dict[float, Scores]) -> None:
    lines = table([scores[g].report() for g in (1.0, 4.0)]).splitlines()
    assert lines[0] == "| % right in all four | g 1, 8 steps | g 4, 8 steps |"
    assert {line.count("|") for line in lines} == {4}
    assert len(lines) == 2 + 12 + 2 + 4 + 2


def test_training_never_shows_a_held_out_caption(judge: Judge) -> None:
    """Neither its words nor a picture like it, even among blends and misread captions."""
    held_out = torch.tensor([caption in HELD_OUT for caption in CAPTIONS])
    hidden = word_ids(HELD_OUT)
    generator = torch.Generator().manual_seed(4)
    for mix in (Mix(misread=0.5, blended=0.0), Mix(blended=1.0)):
        batch = Scenes(torch.device("cpu"), mix).draw(1500, generator)
        assert not held_out[judge.read(batch.pictures).index].any()
        for words in (batch.words, batch.other_words):
            assert not (words[:, None] == hidden).all(2).any()


def test_a_negative_caption_changes_the_picture(model: Painter, judge: Judge) -> None:
    captions, seeds = [RED_CIRCLE] * 4, range(4)
    plain = paint(model, captions, seeds, steps=8)
    for negative in (BLUE_SQUARE, parse("a large red square on a white background")):
        turned = paint(model, captions, seeds, steps=8, negative=negative)
        assert (to_image(turned) != to_image(plain)).mean() > 0.05
        assert {c.shape for c in judge.read(turned).captions} == {Shape.CIRCLE}


def test_a_seed_fixes_the_picture(model: Painter) -> None:
    one, again, other = (paint(model, [RED_CIRCLE], [s], steps=4) for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert (one - other).abs().max() > 0.5
    assert torch.equal(initial_noise(2**64 - 1), initial_noise(2**64 - 1))


def test_a_picture_does_not_depend_on_who_shares_its_batch(model: Painter) -> None:
    """Twelve requests of 4 to 9 steps that join in turn, as a step scheduler runs them."""
    captions = CAPTIONS[::18]
    plans = [timesteps(4 + i % 6) for i in range(12)]
    scales = [(1.0, 2.0, 4.0, 7.5)[i % 4] for i in range(12)]
    xs = [initial_noise(i) for i in range(12)]
    cond, empty = model.encode(captions), model.encode([None] * 12)
    for tick in range(21):
        rows = [i for i, plan in enumerate(plans) if i <= tick < i + len(plan) - 1]
        if rows:
            t, t_next = (
                torch.stack([plans[i][tick - i + ahead] for i in rows]) for ahead in (0, 1)
            )
            x, guidance = (
                torch.stack([xs[i] for i in rows]),
                torch.tensor([scales[i] for i in rows]),
            )
            for i, moved in zip(
                rows, step(model, x, t, t_next, cond[rows], empty[rows], guidance)[0], strict=True
            ):
                xs[i] = moved
    for i, x in enumerate(xs):
        steps = len(plans[i]) - 1
        alone = paint(model, [captions[i]], [i], guidance=scales[i], steps=steps)[0]
        assert (x - alone).abs().max() <= TOLERANCE
        assert abs(to_image(x).astype(int) - to_image(alone).astype(int)).max() <= 1


def test_guidance_one_never_computes_the_empty_caption(model: Painter) -> None:
    x = torch.stack([initial_noise(1), initial_noise(2)])
    t, t_next = torch.tensor([0.0, 0.5]), torch.tensor([0.5, 1.0])
    cond = model.encode([RED_CIRCLE, BLUE_SQUARE])
    poison = torch.stack([torch.full_like(cond[0], torch.nan), model.encode([None])[0]])
    moved, _ = step(model, x, t, t_next, cond, poison, torch.tensor([1.0, 4.0]))
    assert moved.isfinite().all()
    torch.testing.assert_close(
        moved[0], torch.lerp(x[0], model.denoise(x, t, cond)[0].clamp(-1, 1), 0.5)
    )


def test_previews_come_closer_and_the_last_is_the_picture(model: Painter) -> None:
    x, cond, empty = initial_noise(3)[None], model.encode([RED_CIRCLE]), model.encode([None])
    previews = []
    for t, t_next in pairwise(timesteps(8)):
        x, clean = step(model, x, t[None], t_next[None], cond, empty, torch.tensor([4.0]))
        previews.append(clean)
    assert torch.equal(x, previews[-1])
    errors = [(clean - x).square().mean().item() for clean in previews]
    assert errors[0] > 4 * errors[4] > 4 * errors[6]


def test_a_blend_of_captions_lies_between_them(model: Painter) -> None:
    blue = parse("a large blue circle on a white background")
    ends = model.encode([RED_CIRCLE]), model.encode([blue])
    cond = torch.cat([torch.lerp(*ends, weight) for weight in (0.0, 0.5, 1.0)])
    x, scale = initial_noise(3).expand(3, -1, -1, -1), torch.full((3,), 2.0)
    for t, t_next in pairwise(timesteps(8)):
        empty = model.encode([None] * 3)
        x, _ = step(model, x, t.expand(3), t_next.expand(3), cond, empty, scale)
    middle = x[:, :, 14:18, 14:18].mean((2, 3))
    asked = torch.stack([COLOURS[0], (COLOURS[0] + COLOURS[2]) / 2, COLOURS[2]])
    assert (middle - asked).abs().max() < 0.2


def test_a_picture_taken_half_way_back_stays_where_it_was(model: Painter, judge: Judge) -> None:
    """How a video's next frame starts from the last."""
    clean = paint(model, [RED_CIRCLE], [3], steps=8)
    noise, full = initial_noise(4)[None], torch.ones(1)
    assert torch.equal(renoise(clean, noise, 0 * full), noise)
    assert torch.equal(renoise(clean, noise, full), clean)
    x = renoise(clean, noise, 0.5 * full)
    cond, empty = model.encode([RED_CIRCLE]), model.encode([None])
    for t, t_next in pairwise(torch.linspace(0.5, 1, 5)):
        x, _ = step(model, x, t[None], t_next[None], cond, empty, torch.tensor([2.0]))
    assert judge.read(x).captions == [RED_CIRCLE]
    assert (x - clean).square().mean().sqrt() < 0.3


def test_images_are_rgb_bytes() -> None:
    image = to_image(torch.tensor([-1.0, 0.0, 5.0])[:, None, None].expand(3, 32, 32))
    assert image.shape == (32, 32, 3)
    assert image[9, 9].tolist() == [0, 128, 255]


@pytest.mark.parametrize("steps", [1, 2, 20, 1000])
def test_timesteps_rise_from_noise_to_picture(steps: int) -> None:
    times = timesteps(steps)
    assert len(times) == steps + 1
    assert times[[0, -1]].tolist() == [0, 1]
    assert (times.diff() > 0).all()


def test_no_steps_and_missing_seeds_are_refused(model: Painter) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        timesteps(0)
    with pytest.raises(ValueError, match="2 captions but 1 seeds"):
        paint(model, [RED_CIRCLE, BLUE_SQUARE], [1])
    assert paint(model, [], []).shape == (0, 3, 32, 32)


def test_the_weights_are_small_and_finite(model: Painter) -> None:
    assert WEIGHTS.stat().st_size <= 4_000_000
    assert all(values.isfinite().all() for values in model.parameters())
    assert not any(values.requires_grad for values in model.parameters())
