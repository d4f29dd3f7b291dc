"""Cuts a stream of text into clauses that a voice can speak one by one.

The splitter looks at one character at a time and never back further than the present word, so
how the text was cut into deltas can't show in the clauses, and the work is linear in the text.
"""

import re
from enum import Enum, auto

# A comma starts a new clause only here: shorter pieces sound chopped and cost a model call each.
SOFT_LENGTH = 25
MAX_LENGTH = 200

_NEWLINES = frozenset("\n\r\v\f\x85\u2028\u2029")
# Stand around a word without changing how it ends: quotes, brackets, Markdown emphasis.
_WRAPPERS = "\"'“”‘’«»()[]{}*_`~"  # noqa: RUF001 - typographic quotes are meant
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.){2,}|[A-Z]\.")  # e.g. U.S. Ph.D. and initials
_ABBREVIATIONS = frozenset(
    """mr mrs ms mx dr prof rev hon st mt ft gen gov sen rep capt lt col sgt cmdr cpl maj adm pres
    supt msgr atty jr sr ave blvd rd hwy apt bldg ltd inc corp co bros dept univ assn govt
    approx est vs vol vols fig figs ch sec pp ed eds ca cf al etc viz
    jan feb mar apr jun jul aug sep sept oct nov dec""".split()  # noqa: SIM905 - a word list
)
# "No. 5" is an abbreviation, "No. Five" a sentence.
_BEFORE_NUMBER = frozenset({"no", "nos"})


class _Pause(Enum):
    NONE = auto()
    SOFT = auto()
    FULL = auto()
    UNLESS_NUMBER = auto()


class ClauseSplitter:
    """Text deltas in, clauses out.

    A clause ends at white space after `. ! ? ; :`, at a line break, and after `soft` characters
    also at a comma or an ellipsis. Abbreviations, initials, a list's leading "1." and whatever
    no white space follows (3.14, 1,000) don't end one. White space inside a clause becomes one
    blank. No clause is longer than `limit` characters: a longer one breaks at white space, and a
    longer word wherever the limit falls. Pieces without a letter or digit are dropped.

    Holds at most `limit` characters. Raises ValueError unless 0 < soft <= limit.
    """

    def __init__(self, *, soft: int = SOFT_LENGTH, limit: int = MAX_LENGTH) -> None:
        if not 0 < soft <= limit:
            raise ValueError(f"0 < soft <= limit is needed, got soft={soft}, limit={limit}")
        self._soft = soft
        self._limit = limit
        self._words: list[str] = []
        self._word: list[str] = []
        self._length = 0  # of the words, joined
        self._unless_number = False

    def push(self, text: str) -> list[str]:
        """The clauses that `text` completes; may be empty."""
        return [clause for char in text if (clause := self._feed(char))]

    def flush(self) -> list[str]:
        """The rest (no clause or one), as if the text ended here; then starts afresh."""
        self._end_word()
        clause = self._take()
        return [clause] if clause else []

    def _feed(self, char: str) -> str:
        """Takes one character; the clause it completed, or ""."""
        if char in _NEWLINES:
            self._end_word()
            return self._take()
        if char.isspace():
            return self._take() if self._end_word() else ""
        clause = ""
        if self._unless_number and not char.isdigit():
            clause = self._take()
        elif self._joined(len(self._word) + 1) > self._limit:
            clause = self._break()
        self._unless_number = False
        self._word.append(char)
        return clause

    def _end_word(self) -> bool:
        """Moves the present word, if any, to the words; whether the clause ends with it."""
        if not self._word:
            return False
        word = "".join(self._word)
        pause = _pause_after(word, opens_clause=not self._words)
        self._length = self._joined(len(word))
        self._words.append(word)
        self._word.clear()
        self._unless_number = pause is _Pause.UNLESS_NUMBER
        return pause is _Pause.FULL or (pause is _Pause.SOFT and self._length >= self._soft)

    def _joined(self, more: int) -> int:
        """The clause's length with a word of `more` characters after its words."""
        return self._length + more + (1 if self._words else 0)

    def _break(self) -> str:
        """Ends the clause for its length: before the present word, or within it if it is alone."""
        if not self._words:
            self._words.append("".join(self._word))
            self._word.clear()
        return self._take()

    def _take(self) -> str:
        clause = " ".join(self._words)
        self._words.clear()
        self._length = 0
        self._unless_number = False
        return clause if any(map(str.isalnum, clause)) else ""


def _pause_after(word: str, *, opens_clause: bool) -> _Pause:
    """The pause that a word followed by white space calls for."""
    core = word.strip(_WRAPPERS)
    if not core.strip(".…"):
        return _Pause.NONE  # dots on their own: part of a spaced ellipsis
    if core[-1] in "!?;:":
        return _Pause.FULL
    if core[-1] in ",…" or core.endswith(".."):
        return _Pause.SOFT
    if core[-1] != ".":
        return _Pause.NONE
    stem = core[:-1].casefold()
    if stem in _BEFORE_NUMBER:
        return _Pause.UNLESS_NUMBER
    if stem in _ABBREVIATIONS or _DOTTED.fullmatch(core) or (opens_clause and stem.isdigit()):
        return _Pause.NONE
    return _Pause.FULL
