"""What a conversation remembers at one stage: turns, and how much of an answer was heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_grpc.types import Message, Messages, Prompt, Tensors, Text


@dataclass(slots=True)
class Conversation:
    """The turns of one autoregressive stage. `ask` and `answer` build the present turn, `close`
    ends it; `cut` shortens the answer that was given last."""

    _turns: list[Message] = field(default_factory=list)
    _asked: list[Message] = field(default_factory=list)
    _text: str = ""
    _answer: str = ""
    whole: bool = True
    """False once something was asked that messages cannot tell (token ids)."""

    def ask(self, prompt: Prompt) -> None:
        """Input of the present turn."""
        match prompt.content:
            case Text(text):
                self.ask_text(text)
            case Messages(messages):
                self._asked += messages
            case _:
                self.whole = False

    def ask_text(self, text: str) -> None:
        """Text that is appended to the present turn's question."""
        self._text += text

    def answer(self, text: str) -> None:
        """A piece of the present answer."""
        self._answer += text

    def close(self) -> None:
        """The present answer is complete: the turn is over."""
        self._turns += self._question()
        self._turns.append(Message("assistant", (Text(self._answer),)))
        self._asked, self._text, self._answer = [], "", ""

    def cut(self, heard: str | None) -> None:
        """The last answer, complete or not, was heard up to `heard` only (None: as it is)."""
        if self._answer or self._asked or self._text:
            self.close()
        if heard is not None and self._turns and self._turns[-1].role == "assistant":
            self._turns[-1] = Message("assistant", (Text(heard),))

    def messages(self) -> tuple[Message, ...]:
        """All turns that are over."""
        return tuple(self._turns)

    def _question(self) -> list[Message]:
        said = [Message("user", (Text(self._text),))] if self._text else []
        return [*self._asked, *said]


@dataclass(slots=True)
class Timeline:
    """Which words sound when, in the answer that is being spoken. Times in milliseconds."""

    _clauses: list[tuple[str, float]] = field(default_factory=list)

    def speak(self, tensors: Tensors) -> None:
        """A clause that a talker gave."""
        if tensors.spoken:
            self._clauses.append((tensors.spoken, tensors.duration_ms))

    @property
    def spoken(self) -> bool:
        """Whether a clause has come."""
        return bool(self._clauses)

    def clear(self) -> None:
        """A new answer begins."""
        self._clauses.clear()

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
