"""The clause splitter: where a stream of text is cut for speaking."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_grpc.stages.voice.clauses import MAX_LENGTH, ClauseSplitter

# What makes boundaries, what makes them doubtful, and what fills the space between.
_MARKS = [". ", ".", "...", " . . . ", "…", ", ", ",", "! ", "?! ", ": ", "; ", "\n", "\r\n", " "]
_DOUBTS = ["Mr. ", "e.g. ", "U.S. ", "No. ", "3.14", "1,000", "1. ", '"', ") ", "**", "- ", "\t"]
_PIECES = st.one_of(
    st.sampled_from(_MARKS),
    st.sampled_from(_DOUBTS),
    st.just("a" * 90),
    st.text(alphabet="abCD 19.,", max_size=12),
    st.text(max_size=6),
)
_TEXTS = st.lists(_PIECES, max_size=40).map("".join)


def split(*deltas: str) -> list[str]:
    splitter = ClauseSplitter()
    clauses = [clause for delta in deltas for clause in splitter.push(delta)]
    return clauses + splitter.flush()


@given(text=_TEXTS, cuts=st.lists(st.integers(0, 400)))
def test_deltas_leave_no_trace_in_the_clauses(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    expected = split(text)
    assert split(*[text[a:b] for a, b in pairwise(edges)]) == expected
    assert split(*text) == expected


@given(text=_TEXTS)
def test_every_letter_is_spoken_once_and_in_order(text: str) -> None:
    clauses = split(text)
    assert [c for c in text if c.isalnum()] == [c for c in "".join(clauses) if c.isalnum()]
    for clause in clauses:
        assert 0 < len(clause) <= MAX_LENGTH
        assert any(c.isalnum() for c in clause)
        assert clause == clause.strip()


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("One. Two! Three? Four; five: six", ["One.", "Two!", "Three?", "Four;", "five:", "six"]),
        ("hello there. how are you?", ["hello there.", "how are you?"]),
        ("First line\nsecond line\n\nthird", ["First line", "second line", "third"]),
        ("Windows\r\nlines", ["Windows", "lines"]),
        ("Yes, no, maybe", ["Yes, no, maybe"]),
        ("It is a long way to the sea, and back", ["It is a long way to the sea,", "and back"]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("**Done.** Next (really?) yes", ["**Done.**", "Next (really?)", "yes"]),
        ("many   blanks \t here", ["many blanks here"]),
    ],
)
def test_clauses_end_where_a_speaker_pauses(text: str, clauses: list[str]) -> None:
    assert split(text) == clauses


@pytest.mark.parametrize(
    "text",
    [
        "Pi is 3.14 or so",
        "It costs 1,000,000 dollars at 10:30",
        "Mr. and Mrs. Smith met Dr. Jones",
        "Fruit, e.g. apples, i.e. food",
        "The U.S. president and J. K. Rowling",
        "She has a Ph.D. in physics",
        "See (cf. fig. 3) there",
        "Room No. 5 is free",
        "Nos. 3 and 4",
        "Well... maybe",
        "Well . . . maybe",
        "Well… maybe",
        "1. Apples",
        "see omni.example.org/a,b now",
    ],
)
def test_what_only_looks_like_an_end_is_kept_whole(text: str) -> None:
    assert split(text) == [text]


def test_no_before_a_word_is_a_sentence() -> None:
    assert split("No. Five more") == ["No.", "Five more"]


def test_long_ellipsis_clause_pauses() -> None:
    assert split("I was thinking about that... maybe") == ["I was thinking about that...", "maybe"]


@pytest.mark.parametrize("text", ["", " \n ", "...", "?! -- !!", "***\n---\n", ". . . .", "😀 "])
def test_nothing_speakable_gives_no_clause(text: str) -> None:
    assert split(text) == []


def test_clause_comes_out_with_the_white_space_that_ends_it() -> None:
    splitter = ClauseSplitter()
    assert splitter.push("Hello there.") == []
    assert splitter.push(" ") == ["Hello there."]
    assert splitter.push("Go on\n") == ["Go on"]


def test_flush_starts_afresh() -> None:
    splitter = ClauseSplitter()
    assert splitter.push("Room No.") == []
    assert splitter.flush() == ["Room No."]
    assert splitter.flush() == []
    assert splitter.push("5. Go on. ") == ["5. Go on."]


def test_long_clause_breaks_at_white_space() -> None:
    words = ["word"] * 100
    clauses = split(" ".join(words))
    assert " ".join(clauses).split() == words
    assert [len(clause) for clause in clauses] == [199, 199, 99]


def test_endless_word_breaks_at_the_limit_token_by_token() -> None:
    # A quadratic splitter runs into the test's timeout here.
    assert split(*["abcde"] * 100_000) == ["abcde" * 40] * 2_500


def test_limits_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="soft=30, limit=20"):
        ClauseSplitter(soft=30, limit=20)
