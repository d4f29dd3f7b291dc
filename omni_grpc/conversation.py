"""What a conversation remembers at one stage: turns, and how much of an answer was heard."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from omni_grpc.types import Message, Messages, Prompt, Tensors, Text


@dataclass(slots=True)
class Conversation:
    """The turns of one autoregressive stage. `ask` builds a question, `asked` ends it; `answer`
    builds the answer to the oldest that has none, `close` ends it. `cut` ends what is asked, and
    shortens what was answered."""

    _turns: list[Message] = field(default_factory=list)
    next_answer: int = 0
    """Number of the answer that is closed next."""
    _answers: dict[int, int] = field(default_factory=dict)
    """Where in the turns each answer is, by number."""
    _waiting: deque[list[Message]] = field(default_factory=deque)
    """Questions without an answer, oldest first."""
    _asked: list[Message] = field(default_factory=list)
    _text: str = ""
    _answer: str = ""
    whole: bool = True
    """False once something was asked that messages cannot tell (token ids)."""

    def ask(self, prompt: Prompt) -> None:
        """A piece of the question that is being asked."""
        match prompt.content:
            case Text(text):
                self.ask_text(text)
            case Messages(messages):
                self._asked += messages
            case _:
                self.whole = False

    def ask_text(self, text: str) -> None:
        """Text that is appended to the question that is being asked."""
        self._text += text

    def asked(self) -> None:
        """The question is complete: it wants its answer."""
        said = [Message("user", (Text(self._text),))] if self._text else []
        self._waiting.append([*self._asked, *said])
        self._asked, self._text = [], ""

    def answer(self, text: str) -> None:
        """A piece of the present answer."""
        self._answer += text

    def close(self) -> None:
        """The present answer is complete: the turn is over."""
        self._turns += self._waiting.popleft() if self._waiting else []
        self._answers[self.next_answer] = len(self._turns)
        self.next_answer += 1
        self._turns.append(Message("assistant", (Text(self._answer),)))
        self._answer = ""

    def cut(self, heard: str | None, number: int | None = None) -> None:
        """No more is answered of what was asked. Of answer `number` (None: the last one) only
        `heard` was heard, and nothing of later ones; `heard` None: all, as it is. The question that
        is being asked stays."""
        while self._waiting:
            self.close()
        if heard is None or not self._answers:
            return
        first = max(self._answers) if number is None else number
        for answer, place in self._answers.items():
            if answer >= first:
                said = heard if answer == first else ""
                self._turns[place] = Message("assistant", (Text(said),))

    def messages(self) -> tuple[Message, ...]:
        """All turns that are over."""
        return tuple(self._turns)


@dataclass(slots=True)
class Timeline:
    """Which words sound when, in the answer that was spoken last. Times in milliseconds."""

    answer: int | None = None
    """Number of that answer; None: nothing was spoken."""
    delivered_ms: float = 0.0
    """How much of its sound was written."""
    _clauses: list[tuple[str, float]] = field(default_factory=list)

    def speak(self, answer: int, tensors: Tensors) -> None:
        """A clause of an answer, as a talker gave it; one without words still takes its time."""
        if not tensors.spoken and not tensors.duration_ms:
            return
        if answer != self.answer:
            self.answer, self.delivered_ms = answer, 0.0
            self._clauses.clear()
        self._clauses.append((tensors.spoken, tensors.duration_ms))

    def deliver(self, answer: int, duration_ms: float) -> None:
        """Sound of an answer was written."""
        if answer == self.answer:
            self.delivered_ms += duration_ms

    def heard(self, played_ms: float) -> str:
        """The words that were heard when `played_ms` had been played; a word that was cut off was
        not."""
        words: list[str] = []
        for text, duration in self._clauses:
            spoken = text.split()
            if played_ms >= duration:
                words += spoken
            else:
                words += spoken[: int(len(spoken) * max(0.0, played_ms) / duration)]
                break
            played_ms -= duration
        return " ".join(words)
