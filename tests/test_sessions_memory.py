"""What a conversation remembers: what it was asked, what it said, and what of that was heard."""

from __future__ import annotations

from typing import Any

import pytest

from omni_grpc.conversation import Conversation, Timeline
from omni_grpc.server import Server
from omni_grpc.types import Message, Messages, Prompt, Tensors, Text, TokenIds
from omni_grpc.v1 import params_pb2
from tests.sessions import id_of, talk
from tests.streaming import by_segment, ends
from tests.support import TEXT, collect, freed, sound


def told(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text) of all turns that are over."""
    return [
        (m.role, "".join(part.text for part in m.parts if isinstance(part, Text)))
        for m in conversation.messages()
    ]


def turn(conversation: Conversation, question: str, *answer: str) -> None:
    """A whole turn."""
    conversation.ask_text(question)
    conversation.asked()
    for piece in answer:
        conversation.answer(piece)
    conversation.close()


# ---------------------------------------------------------------- a conversation


def test_turns_are_remembered_in_order() -> None:
    memory = Conversation()
    memory.ask(Prompt(Text("How ")))
    memory.ask_text("are you?")
    memory.asked()
    assert told(memory) == []
    memory.answer("Fi")
    memory.answer("ne.")
    memory.close()
    turn(memory, "Bye", "Bye.")
    assert told(memory) == [
        ("user", "How are you?"),
        ("assistant", "Fine."),
        ("user", "Bye"),
        ("assistant", "Bye."),
    ]


def test_messages_come_as_they_are() -> None:
    memory = Conversation()
    system = Message("system", (Text("Be kind."),))
    memory.ask(Prompt(Messages((system, Message("user", (Text("Hi"),))))))
    memory.asked()
    memory.answer("Hello.")
    memory.close()
    assert told(memory) == [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello.")]
    assert memory.whole
    memory.ask(Prompt(TokenIds([1, 2])))
    assert not memory.whole


def test_questions_that_wait_have_their_own_answers() -> None:
    memory = Conversation()
    for question in ("a", "b", "c"):
        memory.ask_text(question)
        memory.asked()
    for answer in ("A", "B"):
        memory.answer(answer)
        memory.close()
    memory.answer("C")
    memory.close()
    assert [text for _, text in told(memory)] == ["a", "A", "b", "B", "c", "C"]


def test_cut_in_an_answer_keeps_what_was_heard() -> None:
    memory = Conversation()
    turn(memory, "a", "A")
    memory.ask_text("b")
    memory.asked()
    memory.answer("one two three")
    memory.cut("one", 1)
    assert [text for _, text in told(memory)] == ["a", "A", "b", "one"]


def test_cut_after_an_answer_cuts_that() -> None:
    memory = Conversation()
    turn(memory, "a", "A")
    turn(memory, "b", "one two three")
    memory.cut("one two")
    assert [text for _, text in told(memory)] == ["a", "A", "b", "one two"]
    memory.cut(None)
    assert [text for _, text in told(memory)] == ["a", "A", "b", "one two"]


def test_cut_leaves_the_question_that_is_being_asked() -> None:
    memory = Conversation()
    turn(memory, "a", "one two three")
    memory.ask_text("and ")
    memory.cut("one", 0)
    assert [text for _, text in told(memory)] == ["a", "one"]
    memory.ask_text("then?")
    memory.asked()
    memory.answer("B")
    memory.close()
    assert [text for _, text in told(memory)] == ["a", "one", "and then?", "B"]


def test_of_answers_behind_the_one_that_was_heard_nothing_was() -> None:
    memory = Conversation()
    for question in ("a", "b"):
        turn(memory, question, f"answer {question}")
    memory.ask_text("c")
    memory.asked()
    memory.answer("half an")
    memory.cut("answer", 0)
    assert [text for _, text in told(memory)] == ["a", "answer", "b", "", "c", ""]


def test_numbers_go_on_behind_what_was_cut() -> None:
    memory = Conversation()
    turn(memory, "a", "A")
    # Segments 1 and 2 were cut before this stage heard of them.
    memory.cut("A", 0)
    memory.next_answer = 3
    turn(memory, "d", "one two")
    memory.cut("one", 3)
    assert [text for _, text in told(memory)] == ["a", "A", "d", "one"]


def test_nothing_is_there_to_cut_before_the_first_turn() -> None:
    memory = Conversation()
    memory.cut("x", 0)
    memory.cut(None)
    assert memory.messages() == ()


# ---------------------------------------------------------------- what was heard


def clause(words: str, duration_ms: float) -> Tensors:
    """A clause as a talker gives it."""
    return Tensors({}, boundary=True, spoken=words, duration_ms=duration_ms)


@pytest.mark.parametrize(
    ("played_ms", "heard"),
    [
        (0, ""),
        (499, ""),
        (500, "one"),
        (999, "one"),
        (1000, "one two"),
        (1332, "one two"),
        (1334, "one two three"),
        (1999, "one two three four"),
        (2000, "one two three four five"),
        (2**64, "one two three four five"),
    ],
)
def test_words_are_heard_as_they_sound(played_ms: float, heard: str) -> None:
    timeline = Timeline()
    timeline.speak(0, clause("one two", 1000))
    timeline.speak(0, clause("three four five", 1000))
    assert timeline.heard(played_ms) == heard


def test_a_clause_without_words_takes_its_time() -> None:
    timeline = Timeline()
    timeline.speak(0, clause("", 1000))
    timeline.speak(0, clause("late", 500))
    assert timeline.heard(1400) == "" and timeline.heard(1500) == "late"


def test_a_new_answer_has_a_time_of_its_own() -> None:
    timeline = Timeline()
    timeline.speak(0, clause("old words", 1000))
    timeline.deliver(0, 1000)
    timeline.speak(1, clause("new words", 1000))
    assert (timeline.answer, timeline.delivered_ms) == (1, 0)
    # What is still written of the old one is not the new one's.
    timeline.deliver(0, 700)
    timeline.deliver(1, 600)
    assert timeline.delivered_ms == 600
    assert timeline.heard(timeline.delivered_ms) == "new"


# ---------------------------------------------------------------- with real models

FIRST = "What is the capital of France?"
STORY = "Tell me a long story about the sea."


def at_most(tokens: int) -> list[params_pb2.StageParams]:
    """So much from the thinker."""
    message = params_pb2.StageParams(stage="thinker")
    message.sampling.max_tokens = tokens
    return [message]


def as_messages(turns: list[tuple[str, str]]) -> dict[str, Any]:
    """A prompt of these turns."""
    return {"messages": {"messages": [{"role": r, "parts": [{"text": t}]} for r, t in turns]}}


async def prompt_tokens(voice: Any, turns: list[tuple[str, str]]) -> int:
    """How long a plain request over these turns is."""
    answer = await collect(
        voice,
        pipeline="smol-voice",
        prompt=as_messages(turns),
        stage_params=at_most(1),
        output_modalities=[TEXT],
        timeout=60,
    )
    return int(answer[-1].finished.usage.prompt_tokens)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_next_turn_knows_what_was_heard_and_no_more(
    voice: Any, voice_server: Server
) -> None:
    async with talk(voice, pipeline="smol-voice", timeout=200) as one:
        run = voice_server.engine.orchestrator.find(id_of(one))
        thinker = run._graph.get("thinker")
        assert thinker is not None and thinker.memory is not None
        memory = thinker.memory
        await one.update(0, FIRST, end=True)
        await one.until(lambda s: ("code2wav", 0) in ends(s.responses), 60)
        await one.update(1, STORY, end=True, stage_params=at_most(60))
        before = len(sound(one.responses))
        await one.until(lambda s: ("thinker", 1) in ends(s.responses), 60)
        await one.until(lambda s: len(sound(s.responses)) - before > 2 * 24_000 * 1.5, 60)
        story = by_segment(one.responses)[1]
        # The next question has begun when the answer is cut off.
        await one.update(2, "What did ", stage_params=at_most(30))
        await one.interrupt(played_ms=1200)
        await one.until(lambda s: s.interrupts, 5)
        await one.update(3, "I ask you first?", end=True)
        await one.until(lambda s: ("code2wav", 2) in ends(s.responses), 60)
        await one.half_close()
        await one.finished(30)
    turns = told(memory)
    assert [role for role, _ in turns] == ["user", "assistant"] * 3
    said = [text for _, text in turns]
    assert said[:3] == [FIRST, by_segment(one.responses)[0], STORY]
    assert said[4:] == ["What did I ask you first?", by_segment(one.responses)[2]]
    heard = said[3].split()
    assert 1 <= len(heard) < len(story.split()) // 2
    assert heard == story.split()[: len(heard)]
    usage = one.responses[-1].finished.usage
    # The second turn goes on from the first one's cache: its own tokens are all that is new.
    asked = await prompt_tokens(voice, turns[:1]) + await prompt_tokens(voice, turns[:5])
    assert asked < usage.prompt_tokens < asked + 40
    await freed(voice_server, within=10)
