"""docs/structure.md names files, classes and functions: all of them exist."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs/structure.md").read_text()


@pytest.mark.parametrize("step", range(8))
def test_steps_of_structure_name_what_there_is(step: int) -> None:
    rows = re.findall(r"^\| (\d) \|(.*)$", PAGE, re.MULTILINE)
    assert [number for number, _ in rows] == [str(n) for n in range(1, 9)]
    assert named_code(rows[step][1])
    assert_named_code_exists(rows[step][1])


def test_all_of_structure_names_what_there_is() -> None:
    assert_named_code_exists(PAGE)


def test_a_name_that_is_gone_is_noticed() -> None:
    for wrong in (
        "`gone.py`",
        "`run.py` `Gone`",
        "`run.py` `Run.gone`",
        "`pool.py` `Slot`, `gone`",
    ):
        with pytest.raises(AssertionError):
            assert_named_code_exists(wrong)


def named_code(text: str) -> list[tuple[str, list[str]]]:
    """The files that the text names, each with the names that follow it at once."""
    found = re.findall(r"`([\w/]+\.py)`((?:[\s,]+`(?![\w/]+\.py`)[^`]+`)*)", text)
    return [(file, re.findall(r"`([^`]+)`", names)) for file, names in found]


def assert_named_code_exists(text: str) -> None:
    """Every file that the text names exists, and the names that follow it are defined in it."""
    for file, names in named_code(text):
        path = ROOT / "omni_grpc" / file
        assert path.exists(), file
        for name in names:
            kind, _, member = name.rpartition(".") if name[0].islower() else name.partition(".")
            assert_defined(path.read_text(), kind, member, f"{file} {name}")


def assert_defined(source: str, kind: str, member: str, name: str) -> None:
    """The class, and in it or else at the module's level the function or attribute, is in the
    source."""
    if kind:
        found = re.search(rf"^class {kind}\b.*?(?=^[^\s)]|\Z)", source, re.MULTILINE | re.DOTALL)
        assert found is not None, name
        source = found[0]
    if member:
        assert re.search(rf"^\s*((async )?def |(self\.)?){member}\b( ?[(:=])", source, re.M), name
