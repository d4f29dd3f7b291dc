"""A prompt as the engine takes it: chat template, tokens, embeddings, media in their places.

All that takes time happens in the renderer's threads and in those that decode media."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.renderers.hf import HfRenderer, _resolve_chat_template_kwargs, resolve_chat_template
from vllm.renderers.params import ChatParams, TokenizeParams

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, PromptTooLong
from omni_grpc.stages.vllm.media import Item, MediaReader
from omni_grpc.stages.vllm.params import refusal, unsupported
from omni_grpc.stages.vllm.versions import VLLMClientError, process_for_engine

_TEMPLATE_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "chat": ("add_special_tokens", "truncate_prompt_tokens", *_TEMPLATE_ONLY),
    "text": ("add_special_tokens", "truncate_prompt_tokens"),
    "token_ids": ("truncate_prompt_tokens",),
    "embeds": (),
}
"""The tokenization options that mean something, by what the prompt is."""

SHORT = 4096
"""Most characters of a prompt that is rendered on the loop: well under a millisecond."""

_TEMPLATES_OWN = {"messages", "add_generation_prompt", "continue_final_message", "chat_template"}
"""Names in a template that are not the client's to set there."""

_PARTS = {"image": "image_pil", "audio": "audio_url", "video": "video_url"}
"""vLLM's names of the parts of a message that stand for media."""

_PLACEHOLDERS = re.compile("prompt placeholders|Failed to apply prompt replacement")
"""vLLM's words (in a RuntimeError, an AssertionError) for media that have no place in the text."""

_FLOATS = {
    t.DataType.FLOAT32: torch.float32,
    t.DataType.FLOAT16: torch.float16,
    t.DataType.BFLOAT16: torch.bfloat16,
}


class PromptRenderer:
    """Renders prompts with vLLM's own renderer. `chat`: whether text gets the chat template;
    `system`: the system message of chats that bring none (None: the template's own)."""

    def __init__(
        self,
        renderer: Any,
        model_config: Any,
        media: MediaReader,
        *,
        chat: bool | None,
        system: str | None = None,
    ) -> None:
        self._renderer = renderer
        self._model = model_config
        self._media = media
        self._vocabulary: int = model_config.get_vocab_size()
        self._context: int = model_config.max_model_len
        if chat is None:
            chat = bool(getattr(renderer.get_tokenizer(), "chat_template", None))
        self._chat = chat
        self._threads = 0
        """Prompts that are being rendered in threads."""
        self._system = [{"role": "system", "content": system}] if system else []

    @property
    def chat(self) -> bool:
        """Whether text gets the chat template."""
        return self._chat

    def continue_chat(self, turns: list[dict[str, str]], mark: str) -> list[int]:
        """Token ids of what the chat template puts behind an answer whose content is `mark`, up to
        where the next answer begins."""
        tokenizer = self._renderer.get_tokenizer()
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(text.rpartition(mark)[2], add_special_tokens=False)
        return ids

    async def render(
        self, prompt: t.Prompt, options: t.Tokenization | None, tenant: str = ""
    ) -> Any:
        """The engine's input.

        Raises what refuses it: InvalidField, InvalidMedia, NotSupported, PromptTooLong, MediaSource
        with their paths."""
        options = options or t.Tokenization()
        items = await self._media.read(prompt, tenant)
        try:
            return await self._render(prompt, options, items)
        except BaseException as error:
            self._forget(item.key for item in items)
            if isinstance(error, (VLLMClientError, ValueError, TypeError)):
                raise refusal(error, "prompt") from None
            if items and _PLACEHOLDERS.search(str(error)):
                raise InvalidField("prompt", "has not one placeholder for each medium") from None
            raise

    def forget(self, prompt: Any) -> None:
        """To be called when a rendered prompt does not reach the engine."""
        if prompt["type"] == "multimodal":
            self._forget(key for keys in prompt["mm_hashes"].values() for key in keys)

    def _forget(self, keys: Iterable[str]) -> None:
        # Else the sender would leave these contents out next time, and the engine miss them.
        if (cache := self._renderer.mm_processor_cache) is not None:
            for key in keys:
                cache.invalidate(key)

    async def _render(self, prompt: t.Prompt, options: t.Tokenization, items: list[Item]) -> Any:
        match prompt.content:
            case t.Messages(messages):
                return await self._render_chat(_turns(messages, items), options, items)
            case t.Text() | None if self._chat:
                turn = {"role": "user", "content": _content(prompt, items)}
                return await self._render_chat([turn], options, items)
            case t.Text(text):
                self._check_options("text", options)
                return await self._process({"prompt": text}, options, items, chat=False)
            case t.TokenIds(ids):
                return await self._render_tokens(ids, options, items)
            case t.Tensor() as embeds:
                return await self._render_embeds(embeds, options, items)
        raise unsupported("prompt.media", "the stage has no chat template to put media in")

    async def _render_tokens(
        self, ids: list[int], options: t.Tokenization, items: list[Item]
    ) -> Any:
        self._check_options("token_ids", options)
        if len(ids) >= self._context and options.truncate_prompt_tokens is None:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, the context {self._context}")
        if max(ids) >= self._vocabulary:
            place = next(i for i, token in enumerate(ids) if token >= self._vocabulary)
            raise InvalidField(
                f"prompt.token_ids.ids[{place}]",
                f"must be below the vocabulary's size, {self._vocabulary}",
            )
        # vLLM extends the list that it is handed, in place: it gets a copy.
        prompt = {"prompt_token_ids": list(ids)}
        return await self._process(prompt, options, items, chat=False)

    async def _render_chat(
        self, turns: list[dict[str, Any]], options: t.Tokenization, items: list[Item]
    ) -> Any:
        self._check_options("chat", options)
        params = ChatParams(chat_template_kwargs=self._variables(options))
        if turns and turns[0]["role"] != "system":
            turns = [*self._system, *turns]
        if not items and self._at_once(sum(map(_length, turns))):
            _, prompt = self._renderer.render_messages(turns, params)
        else:
            with self._in_thread():
                _, prompt = await self._renderer.render_messages_async(turns, params)
        return await self._process(prompt, options, items, chat=True)

    async def _process(
        self, prompt: Any, options: t.Tokenization, items: list[Item], *, chat: bool
    ) -> Any:
        if items:
            # A template's parts named the keys alone; here are the contents. The order within a
            # modality is the prompt's, in both.
            prompt["multi_modal_data"] = _by_modality((i.modality, i.data) for i in items)
            prompt["multi_modal_uuids"] = _by_modality((i.modality, i.key) for i in items)
        params = self._tokenize_params(options, chat=chat)
        if not items and self._at_once(len(prompt.get("prompt") or "")):
            (tokens,) = self._renderer.tokenize_prompts([prompt], params)
        else:
            with self._in_thread():
                (tokens,) = await self._renderer.tokenize_prompts_async([prompt], params)
        return await process_for_engine(self._renderer, tokens, params)

    def _at_once(self, characters: int) -> bool:
        """Whether a prompt is rendered here and now: it takes less time than to hand it to a thread
        and back, and of many that come together the first is on its way before the last is looked
        at. Never beside a thread: tokenizers cannot be set for two at once."""
        return characters <= SHORT and not self._threads

    @contextmanager
    def _in_thread(self) -> Iterator[None]:
        self._threads += 1
        try:
            yield
        finally:
            self._threads -= 1

    async def _render_embeds(
        self, embeds: t.Tensor, options: t.Tokenization, items: list[Item]
    ) -> Any:
        self._check_options("embeds", options)
        if items:
            raise InvalidField("prompt.media", "cannot go with embeddings")
        if not self._model.enable_prompt_embeds:
            raise unsupported("prompt.embeds", "the stage does not take embeddings")
        size = self._model.get_inputs_embeds_size()
        if embeds.shape[-1] != size or not embeds.shape[0]:
            raise InvalidField("prompt.embeds.shape", f"must be [tokens, {size}]")
        if embeds.shape[0] >= self._context:
            raise PromptTooLong(
                f"the prompt has {embeds.shape[0]} embeddings, the context {self._context}"
            )
        if embeds.dtype not in _FLOATS:
            raise InvalidField("prompt.embeds.dtype", "must be float32, float16 or bfloat16")
        tensor = await asyncio.to_thread(_torch, embeds, self._model.dtype)
        return await self._renderer.process_for_engine_async({"prompt_embeds": tensor}, time.time())

    # ------------------------------------------------------------ options

    def _check_options(self, form: str, options: t.Tokenization) -> None:
        for name in options.__struct_fields__:
            if getattr(options, name) is not None and name not in _OPTIONS[form]:
                raise InvalidField(f"tokenization.{name}", f"means nothing for {form} here")

    def _variables(self, options: t.Tokenization) -> dict[str, Any]:
        variables = dict(options.chat_template_kwargs or {})
        self._check_variables(variables)
        goes_on = bool(options.continue_final_message)
        opens = options.add_generation_prompt
        if goes_on and opens:
            raise InvalidField(
                "tokenization.continue_final_message", "cannot go with add_generation_prompt"
            )
        variables["continue_final_message"] = goes_on
        variables["add_generation_prompt"] = not goes_on if opens is None else opens
        return variables

    def _check_variables(self, variables: dict[str, Any]) -> None:
        """Refuses what the template does not know, which vLLM drops without a word, and what would
        change how it is applied."""
        if not variables or not isinstance(self._renderer, HfRenderer):
            return
        template = resolve_chat_template(
            self._renderer.get_tokenizer(), None, variables.get("tools"), model_config=self._model
        )
        known = (set(_resolve_chat_template_kwargs(template or "")) - _TEMPLATES_OWN) | {"tools"}
        for name in variables:
            if name not in known:
                path = f"tokenization.chat_template_kwargs.{name}"
                raise InvalidField(path, "the chat template has no such name")

    def _tokenize_params(self, options: t.Tokenization, *, chat: bool) -> TokenizeParams:
        renderer = self._renderer
        params = renderer.default_chat_tok_params if chat else renderer.default_cmpl_tok_params
        changes: dict[str, Any] = {}
        if options.add_special_tokens is not None:
            changes["add_special_tokens"] = options.add_special_tokens
        if options.truncate_prompt_tokens is not None:
            changes |= {
                "truncate_prompt_tokens": options.truncate_prompt_tokens,
                "truncation_side": "left",
            }
        return params.with_kwargs(**changes)


def prompt_length(prompt: Any) -> int:
    """Tokens of an engine's input; media count as what they take in the context."""
    if prompt["type"] == "embeds":
        return len(prompt["prompt_embeds"])
    return len(prompt["prompt_token_ids"])


def _content(prompt: t.Prompt, items: list[Item]) -> str | list[dict[str, Any]]:
    """Media beside a text come first, as the contract says."""
    text = prompt.content.text if isinstance(prompt.content, t.Text) else ""
    if not items:
        return text
    parts = [_part(item) for item in items]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _length(turn: dict[str, Any]) -> int:
    """Characters of a message; of one in parts, so many that it is not short."""
    content = turn["content"]
    return len(content) if isinstance(content, str) else SHORT + 1


def _turns(messages: Iterable[t.Message], items: list[Item]) -> list[dict[str, Any]]:
    media = iter(items)
    turns = []
    for message in messages:
        texts = [part.text for part in message.parts if isinstance(part, t.Text)]
        content: str | list[dict[str, Any]] = "".join(texts)
        if len(texts) < len(message.parts):
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, t.Text)
                else _part(next(media))
                for part in message.parts
            ]
        turns.append({"role": message.role, "content": content})
    return turns


def _part(item: Item) -> dict[str, Any]:
    # A key without content: vLLM makes the placeholder, the content follows in `_process`.
    kind = _PARTS[item.modality]
    return {"type": kind, kind: None, "uuid": item.key}


def _by_modality(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for modality, value in pairs:
        lists.setdefault(modality, []).append(value)
    return lists


def _torch(embeds: t.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The embeddings as a tensor of the model's own type. Raises InvalidField."""
    found = torch.frombuffer(bytearray(embeds.data), dtype=_FLOATS[embeds.dtype])
    if not bool(torch.isfinite(found).all()):
        raise InvalidField("prompt.embeds.data", "holds what is not a finite number")
    return found.reshape(embeds.shape).to(dtype)
