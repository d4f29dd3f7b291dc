"""A conversation on one KV cache: a resumable request of the vllm stage.

vLLM takes its input as an async generator and keeps what it has computed between two of its items.
A segment of ours is one item: the new tokens only. What the engine then has in its context is, to
the token: what came before, the answer without its last sampled token, the new input (seen with
vLLM 0.32, `Scheduler._update_request_as_session`). The next item is handed over only after the
boundary of the one before was seen, because a boundary shows as nothing but a finish reason, and
merged deltas could hide it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.engine.protocol import StreamingInput
from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.sampling_params import SamplingParams

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, PromptTooLong
from omni_grpc.ipc import Feed
from omni_grpc.stages.vllm.params import unsupported
from omni_grpc.stages.vllm.prompt import prompt_length

MARK = "\ue000omni\ue000"
"""Stands for an answer while its turn's end is rendered: private-use characters that no template
changes."""
UNCOUNTED = 1 << 60
RETOKENIZED = 16
"""Most tokens that text can have beyond one per byte, where it joins text that was counted."""


class Engine(Protocol):
    """What a session needs of its stage."""

    context: int

    async def render(self, prompt: t.Prompt) -> Any:
        """The engine's input for a first segment. Raises OmniError."""

    async def render_ids(self, ids: list[int]) -> Any:
        """The engine's input for these tokens."""

    def continue_chat(self, turns: list[dict[str, str]]) -> list[int]:
        """Token ids of what a template puts behind the answer MARK, up to the next answer."""

    async def sampling(self, params: t.Params | None, prompt: Any, room: int) -> SamplingParams:
        """vLLM's parameters of a segment. Raises OmniError for what vLLM refuses of them."""

    async def open(
        self, inputs: AsyncGenerator[StreamingInput, None], params: SamplingParams
    ) -> Any:
        """Adds the request; gives the collector of its outputs."""

    async def abort(self, collector: Any) -> None:
        """Aborts it."""


@dataclass(slots=True)
class Draft:
    """The input of the segment that is being written. One form: text, messages or token ids."""

    text: str = ""
    messages: tuple[t.Message, ...] = ()
    ids: tuple[int, ...] = ()
    params: t.Params | None = None
    bound: int = 0
    """No more tokens than this can it have: those that were counted, and one per byte since."""

    def added(self, feed: Feed) -> Draft:
        """The draft with one more chunk. Raises InvalidField for another form."""
        content = feed.prompt.content if feed.prompt is not None else None
        if feed.prompt is not None and (feed.prompt.media or _has_media(content)):
            raise unsupported("prompt.media", "a conversation on one cache takes no media")
        if isinstance(feed.payload, t.TextDelta):
            content = t.Text(feed.payload.text)
        draft = Draft(self.text, self.messages, self.ids, self.params or feed.params, self.bound)
        match content:
            case t.Text(text):
                draft.text += text
                # Nothing was counted yet: neither is what the template adds.
                draft.bound += len(text.encode()) if self.bound else UNCOUNTED
            case t.Messages(messages):
                draft.messages += messages
            case t.TokenIds(ids):
                draft.ids += tuple(ids)
            case t.Tensor():
                raise unsupported("prompt.embeds", "a conversation on one cache takes none")
        if sum(map(bool, (draft.text, draft.messages, draft.ids))) > 1:
            raise InvalidField("prompt", "a segment is of one form: text, messages or token ids")
        return draft

    @property
    def empty(self) -> bool:
        """Whether nothing was asked."""
        return not (self.text or self.messages or self.ids)

    def prompt(self) -> t.Prompt:
        """The draft as a prompt."""
        if self.messages:
            return t.Prompt(t.Messages(self.messages))
        return t.Prompt(t.TokenIds(list(self.ids)) if self.ids else t.Text(self.text))

    def turns(self) -> list[dict[str, str]]:
        """The draft as turns of a conversation."""
        if self.messages:
            return [{"role": m.role, "content": joined(m)} for m in self.messages]
        return [{"role": "user", "content": self.text}]


@dataclass(slots=True)
class Segment:
    """A segment that was checked and waits for, or has, the engine. `length` in tokens."""

    length: int
    prompt: Any
    params: SamplingParams


@dataclass(slots=True)
class Session:
    """The state of one conversation. `update` checks and adds a chunk, `answer` runs a segment."""

    engine: Engine
    chat: bool
    params: t.Params | None
    draft: Draft = field(default_factory=Draft)
    history: int = 0
    """Tokens in the engine's context."""
    turns: list[dict[str, str]] = field(default_factory=list)
    unsaid: list[int] = field(default_factory=list)
    """The last sampled token of an answer that was cut off: the engine drops it, the client has
    it, so it comes again in front of the next input."""
    ready: Segment | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    collector: Any = None
    _queue: asyncio.Queue[StreamingInput | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.idle.set()

    async def update(self, feed: Feed) -> None:
        """Adds a chunk. Waits while a segment is being answered: only then its place is known.

        Raises OmniError; the draft is then as it was.
        """
        await self.idle.wait()
        draft = self.draft.added(feed)
        if draft.empty:
            # A stage before it had nothing to say: there is nothing to answer.
            self.draft = draft
            return
        # The chunk that does not fit is refused itself: without it the segment can still end.
        sure = draft.text and self.history + draft.bound + RETOKENIZED < self.engine.context
        if feed.end_of_segment or not sure:
            prompt = await self._rendered(draft)
            draft.bound = prompt_length(prompt)
            if feed.end_of_segment:
                self.ready = await self._segment(draft, prompt)
                self.idle.clear()
        self.draft = draft

    async def _rendered(self, draft: Draft) -> Any:
        """The engine's input: of the first turn a whole prompt, of later ones what is new."""
        if draft.ids or not self.chat or not self.turns:
            prompt = await self.engine.render(draft.prompt())
        elif not self.history:
            # A conversation that goes on from a memory: all of it is new to the engine.
            prompt = await self.engine.render(_as_messages([*self.turns, *draft.turns()]))
        else:
            marked = [*self.turns[:-1], {"role": "assistant", "content": MARK}]
            ids = self.unsaid + self.engine.continue_chat([*marked, *draft.turns()])
            prompt = await self.engine.render_ids(ids)
        length = prompt_length(prompt)
        if self.history + length >= self.engine.context:
            raise PromptTooLong(
                f"{length} tokens on top of {self.history} leave no room in the context of "
                f"{self.engine.context}"
            )
        return prompt

    async def _segment(self, draft: Draft, prompt: Any) -> Segment:
        length = prompt_length(prompt)
        room = self.engine.context - self.history - length
        params = await self.engine.sampling(draft.params or self.params, prompt, room)
        return Segment(length, prompt, params)

    @property
    def next_length(self) -> int:
        """Tokens of the segment that is ready."""
        return self.ready.length if self.ready is not None else 0

    async def answer(self) -> AsyncIterator[RequestOutput]:
        """Runs the segment that is ready: its outputs, up to the one with its finish reason."""
        segment, self.ready = self.ready, None
        assert segment is not None, "no segment was closed"
        if self.collector is None:
            self.collector = await self.engine.open(self._inputs(), segment.params)
        self._queue.put_nowait(StreamingInput(segment.prompt, segment.params))
        tokens: list[int] = []
        text, reason = "", None
        while reason is None:
            output = self.collector.get_nowait() or await self.collector.get()
            for completion in output.outputs:
                tokens += completion.token_ids
                text += completion.text
                reason = completion.finish_reason
            yield output
        self._answered(segment, tokens, text, reason)

    def _answered(self, segment: Segment, tokens: list[int], text: str, reason: str) -> None:
        self.history += segment.length + max(0, len(tokens) - 1)
        self.unsaid = tokens[-1:] if reason == "length" else []
        self.turns += [*self.draft.turns(), {"role": "assistant", "content": text}]
        self.draft = Draft()
        self.idle.set()

    async def _inputs(self) -> AsyncGenerator[StreamingInput, None]:
        while (item := await self._queue.get()) is not None:
            yield item

    async def finish(self) -> None:
        """The input has ended and all of it is answered: lets the engine's request end."""
        if self.collector is None:
            return
        self._queue.put_nowait(None)
        while await self.collector.get() is not STREAM_FINISHED:
            pass
        self.collector.close()
        self.collector = None

    async def close(self) -> None:
        """Frees what the engine holds, wherever the session stands."""
        if self.collector is not None:
            await self.engine.abort(self.collector)
            self.collector.close()
            self.collector = None


def _as_messages(turns: list[dict[str, str]]) -> t.Prompt:
    messages = (t.Message(turn["role"], (t.Text(turn["content"]),)) for turn in turns)
    return t.Prompt(t.Messages(tuple(messages)))


def _has_media(content: object) -> bool:
    if not isinstance(content, t.Messages):
        return False
    return any(isinstance(part, t.Media) for m in content.messages for part in m.parts)


def joined(message: t.Message) -> str:
    """A message's text."""
    return "".join(part.text for part in message.parts if isinstance(part, t.Text))
