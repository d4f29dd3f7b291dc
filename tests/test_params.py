"""Defaults, request and constraints become one set of parameters, by laws that hold for all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from omni_grpc.errors import InvalidField
from omni_grpc.params import FakeScript, merge, parse_fake_script, parse_params
from omni_grpc.types import CodecParams, CustomParams, DiffusionParams, SamplingParams

ids = st.lists(st.integers(0, 9), max_size=4).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(-1, 3),
    seed=st.none() | st.integers(0, 3),
    max_tokens=st.none() | st.integers(1, 3),
    detokenize=st.none() | st.booleans(),
    stop=st.none() | st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
    stop_token_ids=st.none() | ids,
)
ADDED = ("stop", "stop_token_ids")


def given_by(params: SamplingParams | None) -> dict[str, Any]:
    """What is set."""
    return {} if params is None else {k: v for k, v in asdict(params).items() if v is not None}


@given(sampling)
def test_nothing_asked_is_the_defaults(defaults: SamplingParams) -> None:
    assert merge(defaults, None, None, "p") == defaults
    assert merge(defaults, SamplingParams(), SamplingParams(), "p") == defaults


@given(sampling, sampling)
def test_what_is_asked_holds(defaults: SamplingParams, asked: SamplingParams) -> None:
    merged = given_by(merge(defaults, asked, None, "p"))  # type: ignore[arg-type]
    assert merged == given_by(defaults) | given_by(asked)


@given(sampling, st.none() | sampling, sampling)
def test_constraints_hold_or_refuse(
    defaults: SamplingParams, asked: SamplingParams | None, fixed: SamplingParams
) -> None:
    wanted, required = given_by(asked), given_by(fixed)
    conflicts = [
        name
        for name in wanted.keys() & required.keys() - set(ADDED)
        if wanted[name] != required[name]
    ]
    if conflicts:
        with pytest.raises(InvalidField) as caught:
            merge(defaults, asked, fixed, "stage_params[0].sampling")
        names = [v.field.removeprefix("stage_params[0].sampling.") for v in caught.value.violations]
        assert set(names) <= set(conflicts)
        return
    merged = given_by(merge(defaults, asked, fixed, "p"))  # type: ignore[arg-type]
    free = given_by(defaults) | wanted
    for name in merged.keys() | required.keys():
        if name not in required:
            assert merged[name] == free[name]
        elif name in ADDED:
            assert set(merged[name]) == set(free.get(name, ())) | set(required[name])
            assert len(set(merged[name])) == len(merged[name])
        else:
            assert merged[name] == required[name]


@given(sampling, sampling, sampling)
def test_merging_changes_no_input_and_is_stable(
    defaults: SamplingParams, asked: SamplingParams, fixed: SamplingParams
) -> None:
    # Only what does not conflict.
    agreed = replace(asked, **{k: v for k, v in given_by(fixed).items() if k not in ADDED})
    before = (asdict(defaults), asdict(agreed), asdict(fixed))
    once = merge(defaults, agreed, fixed, "p")
    assert (asdict(defaults), asdict(agreed), asdict(fixed)) == before
    assert merge(once, agreed, fixed, "p") == once or agreed.stop or agreed.stop_token_ids
    assert merge(defaults, agreed, fixed, "p") == once


numbers = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3)


@given(numbers, numbers, numbers)
def test_custom_parameters_follow_the_same_laws(
    defaults: dict[str, int], asked: dict[str, int], fixed: dict[str, int]
) -> None:
    arguments = (CustomParams(defaults), CustomParams(asked), CustomParams(fixed))
    conflicts = {name for name in asked.keys() & fixed.keys() if asked[name] != fixed[name]}
    if conflicts:
        with pytest.raises(InvalidField) as caught:
            merge(*arguments, "p")
        assert caught.value.violations[0].field.removeprefix("p.") in conflicts
    else:
        assert merge(*arguments, "p") == CustomParams(defaults | asked | fixed)


def test_falsy_values_that_are_asked_hold() -> None:
    defaults = SamplingParams(temperature=0.7, top_k=5, seed=3, ignore_eos=True)
    asked = SamplingParams(temperature=0.0, top_k=0, seed=0, ignore_eos=False)
    assert merge(defaults, asked, None, "p") == asked
    with pytest.raises(InvalidField):
        merge(defaults, asked, SamplingParams(seed=1), "p")


def test_a_constraint_that_is_falsy_holds() -> None:
    fixed = SamplingParams(detokenize=False)
    assert merge(SamplingParams(detokenize=True), None, fixed, "p") == fixed
    with pytest.raises(InvalidField):
        merge(SamplingParams(), SamplingParams(detokenize=True), fixed, "p")


@pytest.mark.parametrize(
    ("engine", "values", "expected"),
    [
        ("vllm", {"temperature": 0, "stop": ["x"]}, SamplingParams(temperature=0.0, stop=("x",))),
        ("diffusion", {"steps": 4}, DiffusionParams(steps=4)),
        ("codec", {"voice": "v"}, CodecParams(voice="v")),
        ("fake", {"outputs": 2}, CustomParams({"outputs": 2})),
        ("python", {"what": "ever"}, CustomParams({"what": "ever"})),
    ],
)
def test_configured_parameters_are_of_the_engines_kind(
    engine: str, values: dict[str, Any], expected: Any
) -> None:
    assert parse_params(engine, values) == expected


@pytest.mark.parametrize(
    ("engine", "values", "name"),
    [
        ("vllm", {"temprature": 0}, "temprature"),
        ("vllm", {"temperature": "hot"}, "temperature"),
        ("diffusion", {"n": 1}, "n"),
        ("codec", {"speed": []}, "speed"),
        ("fake", {"wrods": 1}, "wrods"),
        ("fake", {"outputs": -1}, "outputs"),
    ],
)
def test_configured_parameters_that_are_wrong_are_named(
    engine: str, values: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        parse_params(engine, values)


def test_a_structs_whole_numbers_are_integers() -> None:
    assert parse_fake_script({"outputs": 3.0, "bytes": 0.0}) == FakeScript(outputs=3, bytes=0)


@given(
    st.dictionaries(
        st.sampled_from(FakeScript.__struct_fields__) | st.text(max_size=4),
        st.none()
        | st.booleans()
        | st.floats(allow_nan=False)
        | st.text(max_size=4)
        | st.sampled_from(["3", "true", "0.5"])
        | st.lists(st.none(), max_size=1)
        | st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
        max_size=4,
    )
)
def test_a_script_is_taken_or_refused_by_name(values: dict[str, Any]) -> None:
    try:
        script = parse_fake_script(values, "p")
    except InvalidField as error:
        assert [v.field.removeprefix("p.") in values for v in error.violations] == [True]
    else:
        for name, value in values.items():
            assert value is None or type(value) is not str, f"{name} is text"
            assert getattr(script, name) == value
