"""A conversation: turns of text or speech over one session, which remembers what was said."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_grpc.v1.prompt_pb2 import Prompt
from omni_grpc_client.answer import Outputs
from omni_grpc_client.errors import CancelledCallError, ProtocolError
from omni_grpc_client.events import Accepted, Event, Finished, Output, SegmentEnd
from omni_grpc_client.feed import Content
from omni_grpc_client.interaction import Interaction
from omni_grpc_client.media import Audio, AudioFormat, Image, Modality
from omni_grpc_client.notices import Interrupted, UpdateRejected
from omni_grpc_client.pump import pumped
from omni_grpc_client.request import Params, PromptLike

if TYPE_CHECKING:
    from omni_grpc_client.client import OmniClient

CHUNK_BYTES = 1 << 15
"""Sound is sent in pieces of about this size."""
SPEECH_FORMAT = AudioFormat(sample_rate_hz=16_000)
"""Of sound that comes without a format."""

Pieces = AsyncIterable[str] | AsyncIterable[bytes] | Iterator[str] | Iterator[bytes]
Said = PromptLike | bytes | Audio | Pieces
"""What one turn says: text, messages or sound; or text or sound in pieces, as they come."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn. `interrupted`: it was cut off, and holds what came until then."""

    text: str
    audio: Audio | None
    images: tuple[Image, ...]
    interrupted: bool


class Conversation:
    """A conversation that stands; made by `OmniClient.converse`. One turn at a time."""

    def __init__(self, session: Interaction, accepted: Accepted, opening: PromptLike = "") -> None:
        self.session = session
        """The session under it."""
        self.accepted = accepted
        self.request_id = session.request_id
        self._answering = frozenset(o.stage for o in accepted.outputs) or frozenset(accepted.stages)
        self._opening = opening
        self._opened_at: int | None = None
        """Number of the chunk that brought the opening."""
        self._turns = 0
        self._format = SPEECH_FORMAT
        self._interrupts = 0
        self._heard_interrupts = 0
        self._interrupted = False
        self._over = False

    async def ask(
        self,
        said: Said,
        *,
        format: AudioFormat | None = None,
        stage_params: Mapping[str, Params] | None = None,
    ) -> Turn:
        """Says something and returns the whole answer. Parameters, errors as for `stream`."""
        outputs = Outputs(self.accepted.outputs)
        events = self.stream(said, format=format, stage_params=stage_params)
        async with aclosing(events):
            async for event in events:
                outputs.add(event)
        text = outputs.texts[0] if outputs.texts else ""
        return Turn(text, outputs.audio, outputs.images, self._interrupted)

    async def stream(
        self,
        said: Said,
        *,
        format: AudioFormat | None = None,
        stage_params: Mapping[str, Params] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Says something and yields the answer's events as they come, until each stage that gives
        outputs has answered, or the answer was interrupted.

        `format` is for sound as bytes (None: 16-bit PCM at 16 kHz, one channel) and must be the
        same in all turns. `stage_params` hold for this turn. Breaking out leaves the answer where
        it is; it is skipped when the next turn begins. What was refused of a turn raises its
        OmniCallError, and the conversation goes on. Where pieces' own iteration raises, what was
        sent of them stays, and the next turn goes on with it. Raises what the session raises when
        it ends, and CancelledCallError when it has ended."""
        if self._over:
            raise CancelledCallError("CANCELLED", "the conversation is over")
        segment, earlier = self._turns, self._interrupts - self._heard_interrupts
        self._interrupted = False
        await self._say(said, format, stage_params)
        self._turns += 1
        missing, refused, last = set(self._answering), None, self.session.next_seq - 1
        async for item in self.session:
            match item:
                case Interrupted():
                    self._heard_interrupts += 1
                    # An interrupt that came too late for the turn before is not about this one.
                    if earlier == 0:
                        self._interrupted = True
                        return
                    earlier -= 1
                case UpdateRejected():
                    # Those behind it are refused too, one by one: their numbers are used again.
                    refused = refused or item
                    if item.seq == last:
                        self._forget(segment, refused.seq)
                        raise refused.error
                case SegmentEnd(segment=number, stage=stage) if number == segment:
                    yield item
                    missing.discard(stage)
                    if not missing:
                        return
                case Output(segment=number) if number == segment:
                    yield item
                case Finished():
                    self._over = True
                    yield item
                    return
        raise ProtocolError("the session ended within a turn")

    async def interrupt(self, played_ms: int | None = None) -> None:
        """Ends the present answer; `played_ms` of its sound were heard (None: all that came), and
        the rest is not remembered."""
        self._interrupts += 1
        await self.session.interrupt(played_ms)

    def _forget(self, turn: int, seq: int) -> None:
        """The turn was refused, from that chunk on."""
        self._turns = turn
        if self._opened_at is not None and seq <= self._opened_at:
            self._opened_at = None

    async def _say(
        self, said: Said, form: AudioFormat | None, stage_params: Mapping[str, Params] | None
    ) -> None:
        if isinstance(said, Audio):
            form = said.format
        self._format = form or self._format
        # With the first turn and not when the session begins: a turn's parameters go with its
        # first chunk.
        if self._opening and self._opened_at is None:
            self._opened_at = self.session.next_seq
            if (whole := _joined(self._opening, said)) is not None:
                said = whole
            else:
                await self.session.send(self._opening, stage_params=stage_params)
                stage_params = None
        pieces: AsyncGenerator[Content, None]
        match said:
            case str() | Prompt() | list() | tuple():
                await self.session.send(said, end_of_segment=True, stage_params=stage_params)
                return
            case Audio(data=sound) | bytes(sound):
                pieces = pumped(_cut(sound, self._format))
            case AsyncIterable() | Iterator():
                pieces = pumped(said)
            case _:
                raise TypeError(f"nothing that can be said: {type(said).__name__}")
        async with aclosing(pieces):
            async for piece in pieces:
                form = self._format if isinstance(piece, bytes) else None
                await self.session.send(piece, stage_params=stage_params, format=form)
                stage_params = None
        await self.session.send(end_of_segment=True, stage_params=stage_params)


def _joined(opening: PromptLike, said: Said) -> PromptLike | None:
    """Both in one; None where they stay two chunks. A turn is of one form: behind messages, text is
    a message too."""
    if isinstance(opening, str | Prompt) or isinstance(said, bytes | Audio | Prompt):
        return None
    match said:
        case str():
            return [*opening, ("user", said)]
        case list() | tuple():
            return [*opening, *said]
    return None


def _cut(sound: bytes, form: AudioFormat) -> list[bytes]:
    step = max(CHUNK_BYTES // form.frame_bytes, 1) * form.frame_bytes
    return [sound[at : at + step] for at in range(0, len(sound), step)]


@asynccontextmanager
async def converse(
    self: OmniClient,
    prompt: PromptLike = "",
    *,
    pipeline: str = "",
    request_id: str = "",
    stage_params: Mapping[str, Params] | None = None,
    output_modalities: Iterable[Modality | str] = (),
    timeout: float | None = None,
) -> AsyncIterator[Conversation]:
    """A conversation, `async with client.converse() as talk: turn = await talk.ask("Hello.")`.

    `prompt` is what it begins with, a system message for instance; it is part of the first turn,
    and text of that turn is then a message too.
    `stage_params` hold for all turns that bring none. `timeout` in seconds for the whole of it.
    Leaving the block ends the conversation. Errors as for `interact`."""
    opened = self.interact(
        pipeline=pipeline,
        request_id=request_id,
        stage_params=stage_params,
        output_modalities=output_modalities,
        resumable=True,
        timeout=timeout,
    )
    async with opened as session:
        accepted = await anext(session)
        if not isinstance(accepted, Accepted):
            raise ProtocolError("the session's first item is not accepted")
        yield Conversation(session, accepted, prompt)
