"""The autoregressive stage: vLLM's AsyncLLM in this process, its engine core in a child.

Prompts are rendered and tokenized here, in the replica; parameters become vLLM's own. What vLLM
refuses is refused before the request counts as admitted, with the field's path."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, NotSupported, OmniError, PromptTooLong
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.stages.base import Inputs, ReplicaDead, Stage

log = logging.getLogger("omni_grpc.replica")

_TOO_LONG = ("input_text", "input_tokens", "prompt_tokens")
"""What vLLM calls the parameter that is wrong when a prompt is too long."""

_REASONS = {
    "stop": t.FinishReason.STOP,
    "length": t.FinishReason.LENGTH,
    "repetition": t.FinishReason.REPETITION,
}


@dataclasses.dataclass(slots=True)
class Submitted:
    """A request that the engine has taken: where its outputs come, and its id in the engine."""

    collector: Any
    prompt_tokens: int


class VllmStage(Stage[Submitted]):
    """The stage of engine `vllm`. `engine_args` are AsyncEngineArgs, but for `chat`: whether `text`
    prompts get the chat template (default: if the model has one)."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        arguments = dict(spec.engine_args)
        self._chat: bool | None = arguments.pop("chat", None)
        self._arguments = arguments

    async def load(self) -> t.StageFacts:
        arguments = AsyncEngineArgs(
            model=self.spec.model, disable_log_stats=True, **self._arguments
        )
        self._engine = AsyncLLM.from_engine_args(arguments)
        config = self._engine.vllm_config.model_config
        self._context: int = config.max_model_len
        self._vocabulary: int = config.get_vocab_size()
        self._defaults: dict[str, Any] = config.get_diff_sampling_param()
        renderer = self._engine.renderer
        if self._chat is None:
            self._chat = bool(getattr(renderer.get_tokenizer(), "chat_template", None))
        await self._warm_up()
        versions = {name: metadata.version(name) for name in ("torch", "transformers")}
        return t.StageFacts(
            context_tokens=self._context,
            capacity=self._engine.vllm_config.scheduler_config.max_num_seqs,
            versions=versions | {"vllm": _vllm_version()},
        )

    async def _warm_up(self) -> None:
        params = SamplingParams(max_tokens=4, temperature=0, output_kind=RequestOutputKind.DELTA)
        prompt = await self._render_tokens([0])
        async for _ in self._engine.generate(prompt, params, "warm-up"):
            pass

    # ------------------------------------------------------------ prepare

    async def prepare(self, task: Task) -> Submitted:
        if task.prompt is None:
            raise NotSupported("a vllm stage takes prompts, not another stage's outputs")
        asked = task.params if isinstance(task.params, t.SamplingParams) else t.SamplingParams()
        try:
            prompt = await self._render(task.prompt, task.options.tokenization)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise refusal(error, "prompt") from None
        length = len(prompt["prompt_token_ids"])
        if length >= self._context:
            raise PromptTooLong(
                f"the prompt has {length} tokens; the context of {self._context} leaves no room"
            )
        try:
            params = sampling_params(asked, self._defaults, room=self._context - length)
            collector = await self._submit(task, prompt, params)
        except EngineDeadError as error:
            raise ReplicaDead("the engine is dead") from error
        except (VLLMClientError, ValueError) as error:
            raise refusal(error, "params", asked) from None
        return Submitted(collector, length)

    async def _submit(self, task: Task, prompt: Any, params: SamplingParams) -> Any:
        options = task.options
        ranks = self._engine.vllm_config.parallel_config.data_parallel_size
        if options.data_parallel_rank is not None and options.data_parallel_rank >= ranks:
            raise InvalidField("data_parallel_rank", f"must be below {ranks}")
        if options.cache_salt is not None:
            prompt["cache_salt"] = options.cache_salt
        return await self._engine.add_request(
            task.request_id,
            prompt,
            params,
            arrival_time=options.arrival_time,
            trace_headers=options.trace_headers,
            priority=options.priority or 0,
            data_parallel_rank=options.data_parallel_rank,
            reasoning_ended=options.reasoning_ended,
        )

    async def _render(self, prompt: t.Prompt, tokenization: t.Tokenization | None) -> Any:
        match prompt.content:
            case t.Text(text) if self._chat:
                return await self._render_chat([{"role": "user", "content": text}], tokenization)
            case t.Text(text):
                params = self._tokenize_params(tokenization, chat=False)
                return (await self._renderer.render_cmpl_async([{"prompt": text}], params))[0]
            case t.Messages(messages):
                turns = [{"role": m.role, "content": _joined(m)} for m in messages]
                return await self._render_chat(turns, tokenization)
            case t.TokenIds(ids):
                for place, token in enumerate(ids):
                    if token >= self._vocabulary:
                        raise InvalidField(
                            f"prompt.token_ids.ids[{place}]",
                            f"must be below the vocabulary's size, {self._vocabulary}",
                        )
                return await self._render_tokens(ids)
        raise NotSupported("the stage does not take such a prompt")

    @property
    def _renderer(self) -> Any:
        return self._engine.renderer

    async def _render_tokens(self, ids: list[int]) -> Any:
        # vLLM extends the list that it is handed, in place: it gets a copy.
        (prompt,) = await self._renderer.render_cmpl_async(
            [TokensPrompt(prompt_token_ids=list(ids))]
        )
        return prompt

    async def _render_chat(
        self, turns: list[dict[str, str]], tokenization: t.Tokenization | None
    ) -> Any:
        options = tokenization or t.Tokenization()
        variables = dict(options.chat_template_kwargs or {})
        variables["add_generation_prompt"] = options.add_generation_prompt is not False
        variables["continue_final_message"] = bool(options.continue_final_message)
        _, (prompt,) = await self._renderer.render_chat_async(
            [turns],
            ChatParams(chat_template_kwargs=variables),
            self._tokenize_params(tokenization, chat=True),
        )
        return prompt

    def _tokenize_params(self, options: t.Tokenization | None, *, chat: bool) -> TokenizeParams:
        renderer = self._renderer
        params = renderer.default_chat_tok_params if chat else renderer.default_cmpl_tok_params
        changes: dict[str, Any] = {}
        if options is not None and options.add_special_tokens is not None:
            changes["add_special_tokens"] = options.add_special_tokens
        if options is not None and options.truncate_prompt_tokens is not None:
            changes |= {
                "truncate_prompt_tokens": options.truncate_prompt_tokens,
                "truncation_side": "left",
            }
        return params.with_kwargs(**changes)

    # ------------------------------------------------------------ run

    async def run(
        self, task: Task, prepared: Submitted, inputs: Inputs
    ) -> AsyncIterator[t.StageOutput]:
        collector, generated, cached = prepared.collector, 0, 0
        finished = False
        try:
            while not finished:
                # Without an await while something is there: fewer task switches under load.
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                if output is STREAM_FINISHED:
                    break
                cached = output.num_cached_tokens or cached
                for completion in output.outputs:
                    generated += len(completion.token_ids)
                    yield stage_output(output, completion)
        except EngineDeadError as error:
            raise ReplicaDead("the engine is dead") from error
        finally:
            if not finished:
                await self._engine.abort(collector.request_id, internal=True)
            collector.close()
        yield t.StageOutput(usage=t.Usage(prepared.prompt_tokens, cached, generated))

    def statistics(self) -> t.StageStatistics:
        waiting_tokens = self._engine.get_num_queued_tokens()
        return t.StageStatistics(work_left=float(waiting_tokens))

    async def close(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()


def sampling_params(
    asked: t.SamplingParams, defaults: dict[str, Any], *, room: int
) -> SamplingParams:
    """vLLM's SamplingParams: what is asked, else the model's own defaults; `max_tokens` unset is
    `room`.

    Raises InvalidField for what this vLLM does not have, and what vLLM itself raises for values it
    refuses."""
    values: dict[str, Any] = {"max_tokens": room, **defaults}
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is None:
            continue
        if name not in SamplingParams.__struct_fields__:
            raise InvalidField(f"params.{name}", "is not known to this version of vLLM")
        values[name] = _to_vllm(value)
    least, most = values.get("min_tokens", 0), values["max_tokens"]
    if least > most:
        raise InvalidField("params.min_tokens", f"must be at most max_tokens, here {most}")
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **values)


def _to_vllm(value: Any) -> Any:
    match value:
        case t.StructuredOutputs():
            given = {n: getattr(value, n) for n in value.__struct_fields__}
            given["json"] = given.pop("json_schema")
            choice = given["choice"]
            given["choice"] = list(choice) if choice is not None else None
            return StructuredOutputsParams(**{n: v for n, v in given.items() if v is not None})
        case t.RepetitionDetection():
            return RepetitionDetectionParams(
                value.max_pattern_size, value.min_pattern_size, value.min_count
            )
        case tuple():
            return list(value)
    return value


def stage_output(output: RequestOutput, completion: CompletionOutput) -> t.StageOutput:
    """One delta of one answer."""
    finish = None
    if completion.finish_reason is not None:
        reason = _REASONS.get(completion.finish_reason)
        if reason is None:
            # "abort" and "error": the engine gave the request up.
            raise RuntimeError(f"the engine ended a request with {completion.finish_reason!r}")
        finish = t.Finish(reason, completion.stop_reason)
    delta = t.TextDelta(
        completion.text,
        list(completion.token_ids),
        _logprobs(completion.token_ids, completion.logprobs),
        _prompt_logprobs(output),
    )
    return t.StageOutput(delta, index=completion.index, finish=finish)


def _logprobs(token_ids: Any, entries: Any) -> list[t.TokenLogprobs]:
    if not entries:
        return []
    return [_entry(token, found) for token, found in zip(token_ids, entries, strict=True)]


def _prompt_logprobs(output: RequestOutput) -> list[t.TokenLogprobs]:
    if not output.prompt_logprobs or not output.prompt_token_ids:
        return []
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [_entry(token, found or {}) for token, found in pairs]


def _entry(token: int, found: Any) -> t.TokenLogprobs:
    own = found.get(token)
    candidates = tuple(
        t.CandidateLogprob(i, c.logprob, c.rank or 0, c.decoded_token or "")
        for i, c in found.items()
    )
    if own is None:
        return t.TokenLogprobs(token, 0.0, 0, candidates)
    return t.TokenLogprobs(token, own.logprob, own.rank or 0, candidates)


def _joined(message: t.Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, t.Text))


def refusal(error: Exception, place: str, asked: t.SamplingParams | None = None) -> OmniError:
    """vLLM's refusal as ours: too long a prompt, a parameter of `asked`, or else `place` as a
    whole."""
    parameter = getattr(error, "parameter", None)
    text = str(error.args[0]) if error.args else "vLLM refused it"
    if parameter in _TOO_LONG:
        return PromptTooLong(text)
    names = asked.__struct_fields__ if asked is not None else ()
    if parameter not in names:
        # Some of vLLM's checks name the parameter in their text only.
        given = (n for n in names if getattr(asked, n) is not None)
        parameter = next((n for n in given if re.search(rf"\b{n}\b", text)), None)
    return InvalidField(f"{place}.{parameter}" if parameter else place, text)


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)
