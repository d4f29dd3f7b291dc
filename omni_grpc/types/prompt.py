"""What a request asks: text, tokens, messages or embeddings, with media."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_grpc.types.media import Media, Tensor


class Text(msgspec.Struct, frozen=True, tag=True):
    """A plain text prompt."""

    text: str


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """A prompt of token ids, used as they are."""

    ids: list[int]


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation: text and media in order."""

    role: str
    parts: tuple[Text | Media, ...]


class Messages(msgspec.Struct, frozen=True, tag=True):
    """A conversation, oldest message first."""

    messages: tuple[Message, ...]


class Prompt(msgspec.Struct, frozen=True):
    """What stage 0 is asked. `content` of type Tensor is embeddings [tokens, hidden size]."""

    content: Text | TokenIds | Messages | Tensor | None = None
    media: tuple[Media, ...] = ()
    negative_text: str | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is asked."""
        return self.content is None and not self.media


class Tokenization(msgspec.Struct, frozen=True):
    """How the prompt's text becomes tokens; None is the model's default."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
