"""The stage of engine `vllm`. Prompts are rendered and tokenized here, in the replica; parameters
become vLLM's own. What vLLM refuses, or would ignore, is refused before the request counts as
admitted, with the field's path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from omni_grpc import types as t
from omni_grpc.errors import InvalidField, LoraNotFound, NotSupported, PromptTooLong
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.stages.base import Inputs, ReplicaDead, Stage, segments
from omni_grpc.stages.vllm.answer import Submitted, answer, blamed
from omni_grpc.stages.vllm.load import EngineLoad, WatchedEngine
from omni_grpc.stages.vllm.media import MediaReader
from omni_grpc.stages.vllm.outputs import EngineGaveUp, stage_outputs
from omni_grpc.stages.vllm.params import (
    check_form,
    refusal,
    sampling_params,
    unsupported,
)
from omni_grpc.stages.vllm.prompt import PromptRenderer, prompt_length
from omni_grpc.stages.vllm.pulse import Pulse
from omni_grpc.stages.vllm.session import MARK, Session, joined
from omni_grpc.stages.vllm.versions import VLLMClientError
from omni_grpc.stages.vllm.worker import SessionWorker

log = logging.getLogger("omni_grpc.replica")


class VllmStage(Stage[Submitted | Session]):
    """`engine_args` are AsyncEngineArgs, but for `chat`: whether `text` prompts get the chat
    template (default: if the model has one), and `system`: the system message of chats that bring
    none (default: the template's own)."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        arguments = dict(spec.engine_args)
        self._chat: bool | None = arguments.pop("chat", None)
        self._system: str | None = arguments.pop("system", None)
        if spec.lora_adapters:
            arguments.setdefault("enable_lora", True)
        # Without it, templates that take strings would put all media in front of the text.
        arguments.setdefault("interleave_mm_strings", True)
        arguments.setdefault("worker_extension_cls", f"{SessionWorker.__module__}.SessionWorker")
        self._arguments = arguments
        self._adapters = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(sorted(spec.lora_adapters.items()), 1)
        }

    async def load(self) -> t.StageFacts:
        arguments = AsyncEngineArgs(
            model=self.spec.model, disable_log_stats=True, **self._arguments
        )
        self._engine = WatchedEngine.make(arguments)
        await self._engine.collective_rpc("follow_session_seeds")
        config = self._engine.vllm_config
        self._context: int = config.model_config.max_model_len
        self._defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self._prompts = self._make_renderer()
        self._plugins = self._has_plugins()
        # Now and not with its first request: an adapter that does not fit fails the start.
        for adapter in self._adapters.values():
            await self._engine.add_lora(adapter)
        await self._warm_up()
        self._pulse = Pulse(self._engine, self.spec.silence_timeout)
        versions = {name: metadata.version(name) for name in ("torch", "transformers")}
        return t.StageFacts(
            context_tokens=self._context,
            capacity=config.scheduler_config.max_num_seqs,
            versions=versions | {"vllm": str(vllm_version)},
            resumable=True,
        )

    def _make_renderer(self) -> PromptRenderer:
        renderer, model = self._engine.renderer, self._engine.vllm_config.model_config
        limits: dict[str, int] = {}
        rate: float | None = None
        if renderer.mm_processor is not None:
            limits = dict(renderer.mm_processor.info.allowed_mm_limits)
            rate = renderer.mm_processor.data_parser.audio_resampler.target_sr
        media = MediaReader(self.spec, limits, int(rate) if rate else None)
        return PromptRenderer(renderer, model, media, chat=self._chat, system=self._system)

    async def _warm_up(self) -> None:
        params = SamplingParams(max_tokens=4, temperature=0, output_kind=RequestOutputKind.DELTA)
        prompt = await self._prompts.render(t.Prompt(t.TokenIds([0])), None)
        async for _ in self._engine.generate(prompt, params, "warm-up"):
            pass
        # vLLM imports its grammar libraries with the first form: a second in which all would stand.
        form = t.SamplingParams(structured_outputs=t.StructuredOutputs(regex="a"))
        await self._check_params(form)

    # ------------------------------------------------------------ prepare

    async def prepare(self, task: Task) -> Submitted | Session:
        if task.resumable:
            self._check_options(task.options)
            asked = task.params if isinstance(task.params, t.SamplingParams) else None
            turns = [{"role": m.role, "content": joined(m)} for m in task.history]
            engine = _SessionEngine(self, task)
            return Session(engine, self._prompts.chat, asked, turns=turns)
        return await self._begin(task)

    async def _begin(self, task: Task) -> Submitted:
        if task.prompt is None:
            raise NotSupported("a vllm stage takes prompts, not another stage's outputs")
        asked = task.params if isinstance(task.params, t.SamplingParams) else t.SamplingParams()
        self._check_options(task.options)
        await self._check_params(asked)
        prompt = await self._prompts.render(
            task.prompt, task.options.tokenization, task.options.tenant
        )
        # From here to the engine nothing waits for others: it must see media in the order in which
        # the renderer did.
        try:
            return await self._enqueue(task, prompt, asked)
        except BaseException:
            self._prompts.forget(prompt)
            raise

    async def _check_params(self, asked: t.SamplingParams) -> None:
        """What can be said of parameters without the prompt, and may take its time."""
        if asked.extra_args and not self._plugins:
            raise InvalidField("params.extra_args", "the stage has no plug-in that reads them")
        if asked.structured_outputs is None:
            return
        config = self._engine.vllm_config
        check_form(asked.structured_outputs, config.structured_outputs_config)
        try:
            params = sampling_params(asked, self._defaults, room=self._context)
            # In a thread: a large schema takes its time.
            await asyncio.to_thread(self._verify, params)
        except (VLLMClientError, ValueError) as error:
            raise refusal(error, "params", asked) from None

    def _verify(self, params: SamplingParams) -> None:
        config = self._engine.vllm_config
        params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self._engine.renderer.tokenizer,
        )

    async def _enqueue(self, task: Task, prompt: Any, asked: t.SamplingParams) -> Submitted:
        length = prompt_length(prompt)
        if length >= self._context:
            raise PromptTooLong(
                f"the prompt has {length} tokens; the context of {self._context} leaves no room"
            )
        if prompt["type"] == "embeds" and asked.prompt_logprobs is not None:
            raise InvalidField("params.prompt_logprobs", "cannot go with embeddings: no tokens")
        try:
            params = sampling_params(asked, self._defaults, room=self._context - length)
            collector = await self._submit(task, prompt, params)
        except EngineDeadError as error:
            raise ReplicaDead("the engine is dead") from error
        except (VLLMClientError, ValueError) as error:
            raise refusal(error, "params", asked) from None
        return Submitted(
            collector, length, prompt["type"] == "multimodal", asked.structured_outputs
        )

    def _has_plugins(self) -> bool:
        """Whether anything in this engine reads `extra_args`."""
        config = self._engine.vllm_config
        return bool(
            config.model_config.logits_processors
            or config.kv_transfer_config
            or metadata.entry_points(group="vllm.logits_processors")
        )

    def _check_options(self, options: t.RequestOptions) -> None:
        """Refuses what vLLM would ignore, or would refuse without saying where."""
        config = self._engine.vllm_config
        if options.priority and config.scheduler_config.policy != "priority":
            raise unsupported("priority", "the stage does not schedule by priority")
        ranks = config.parallel_config.data_parallel_size
        if options.data_parallel_rank is not None and options.data_parallel_rank >= ranks:
            raise InvalidField("data_parallel_rank", f"must be below {ranks}")
        if options.lora is not None and options.lora not in self._adapters:
            raise LoraNotFound(f"stage {self.spec.stage!r} has no adapter {options.lora!r}")

    async def _submit(self, task: Task, prompt: Any, params: SamplingParams) -> Any:
        """Adds a request, or a conversation whose inputs `prompt` generates."""
        options = task.options
        if options.cache_salt and isinstance(prompt, dict):
            prompt["cache_salt"] = options.cache_salt
        return await self._engine.add_request(
            task.request_id,
            prompt,
            params,
            arrival_time=options.arrival_time,
            lora_request=self._adapters[options.lora] if options.lora is not None else None,
            trace_headers=options.trace_headers,
            priority=options.priority or 0,
            data_parallel_rank=options.data_parallel_rank,
            reasoning_ended=options.reasoning_ended,
        )

    async def prepare_update(self, task: Task, prepared: Submitted | Session, feed: Feed) -> None:
        if isinstance(prepared, Session):
            await prepared.update(feed)

    # ------------------------------------------------------------ run

    def shorten(self, prepared: Submitted | Session, say: Callable[[str, list[int]], None]) -> None:
        # vLLM's own accounts, where they are kept, need every token.
        if isinstance(prepared, Submitted) and not self._engine.log_stats:
            prepared.line = self._engine.short_cut.open(prepared.collector.request_id, say)

    async def run(
        self, task: Task, prepared: Submitted | Session, inputs: Inputs
    ) -> AsyncIterator[t.StageOutput]:
        outputs = (
            self._converse(prepared, inputs)
            if isinstance(prepared, Session)
            else self._generate(task, prepared)
        )
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    yield output
            except EngineDeadError as error:
                raise ReplicaDead("the engine is dead") from error

    async def _converse(self, session: Session, inputs: Inputs) -> AsyncGenerator[t.StageOutput]:
        """The answers of a conversation, segment by segment."""
        try:
            async for segment in segments(inputs):
                async for feed in segment:
                    if feed.number is None:
                        # From another stage: nobody has checked it yet.
                        await session.update(feed)
                if not segment.closed:
                    continue
                if session.ready is None:
                    nothing = t.Finish(t.FinishReason.COMPLETE)
                    yield t.StageOutput(finish=nothing, segment_end=True)
                    continue
                used, generated, finish = session.next_length, 0, None
                async for output in session.answer():
                    generated += sum(len(c.token_ids) for c in output.outputs)
                    for delta in stage_outputs(output, prompt_too=False):
                        finish = delta.finish
                        yield msgspec.structs.replace(delta, finish=None)
                yield t.StageOutput(
                    finish=finish, segment_end=True, usage=t.Usage(used, 0, generated)
                )
            await session.finish()
        finally:
            await session.close()

    async def _generate(self, task: Task, prepared: Submitted) -> AsyncGenerator[t.StageOutput]:
        try:
            async with aclosing(answer(self._engine, prepared)) as outputs:
                async for output in outputs:
                    yield output
            return
        except EngineGaveUp as error:
            if not prepared.media:
                raise blamed(error, prepared) from None
        # The engine had dropped a picture that its sender thought it had. The sender knows by now,
        # so the second time it sends all. Nothing was said yet.
        log.info("request %s: media are sent again", task.request_id)
        again = await self._begin(task)
        try:
            async with aclosing(answer(self._engine, again)) as outputs:
                async for output in outputs:
                    yield output
        except EngineGaveUp as error:
            raise blamed(error, again) from None

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        engine = self._engine
        match command:
            case "reset_cache":
                if arguments["prefix_cache"]:
                    await engine.reset_prefix_cache()
                if arguments["media_cache"]:
                    await engine.reset_mm_cache()
            case "sleep":
                if not engine.vllm_config.model_config.enable_sleep_mode:
                    raise NotSupported("the stage was not started with enable_sleep_mode")
                await engine.sleep(level=arguments["level"])
            case "wake":
                await engine.wake_up()
            case "load_lora":
                await self._load_lora(arguments["name"], arguments["path"])
            case "unload_lora":
                adapter = self._adapters.pop(arguments["name"], None)
                if adapter is not None:
                    await engine.remove_lora(adapter.lora_int_id)
            case _:
                await super().control(command, arguments)

    async def _load_lora(self, name: str, path: str) -> None:
        if not self._engine.vllm_config.lora_config:
            raise unsupported("name", "the stage was not started with enable_lora")
        if not await asyncio.to_thread(Path(path).is_dir):
            raise InvalidField("path", "is not a folder")
        number = max((a.lora_int_id for a in self._adapters.values()), default=0) + 1
        adapter = LoRARequest(name, number, path)
        try:
            await self._engine.add_lora(adapter)
        except EngineDeadError as error:
            raise ReplicaDead("the engine is dead") from error
        except Exception as error:
            # What the engine core raised comes back as a bare Exception with its text.
            raise InvalidField("path", f"is no adapter that fits: {error}") from None
        self._adapters[name] = adapter

    def statistics(self) -> t.StageStatistics:
        if self._pulse.stopped:
            raise ReplicaDead("the engine core is gone, or stands still")
        load: EngineLoad = self._engine.load
        return load.statistics(self._engine, self._counters())

    def _counters(self) -> dict[str, int]:
        """How often a prompt's medium was known here already."""
        cache = self._engine.renderer.mm_processor_cache
        if cache is None:
            return {}
        found = cache.make_stats()
        return {"media_cache_hits": found.hits, "media_cache_queries": found.total}

    async def close(self) -> None:
        if hasattr(self, "_pulse"):
            await self._pulse.close()
        if hasattr(self, "_engine"):
            self._engine.shutdown()


class _SessionEngine:
    """What a Session needs of the stage, for one task."""

    def __init__(self, stage: VllmStage, task: Task) -> None:
        self.context = stage._context
        self._stage = stage
        self._task = task

    async def render(self, prompt: t.Prompt) -> Any:
        options = self._task.options
        rendered = await self._stage._prompts.render(prompt, options.tokenization, options.tenant)
        return self._salted(rendered)

    async def render_ids(self, ids: list[int]) -> Any:
        return self._salted(await self._stage._prompts.render(t.Prompt(t.TokenIds(ids)), None))

    def _salted(self, prompt: Any) -> Any:
        if self._task.options.cache_salt:
            prompt["cache_salt"] = self._task.options.cache_salt
        return prompt

    def continue_chat(self, turns: list[dict[str, str]]) -> list[int]:
        return self._stage._prompts.continue_chat(turns, MARK)

    async def sampling(self, params: t.Params | None, prompt: Any, room: int) -> SamplingParams:
        asked = params if isinstance(params, t.SamplingParams) else t.SamplingParams()
        try:
            await self._stage._check_params(asked)
            made = sampling_params(asked, self._stage._defaults, room=room)
            engine = self._stage._engine
            # vLLM's own checks, now: once the input is handed over they would end the request.
            engine.input_processor.process_inputs(
                self._task.request_id, prompt, made, await engine.get_supported_tasks()
            )
        except (VLLMClientError, ValueError) as error:
            raise refusal(error, "params", asked) from None
        return made

    async def open(
        self, inputs: AsyncGenerator[StreamingInput, None], params: SamplingParams
    ) -> Any:
        return await self._stage._submit(self._task, inputs, params)

    async def abort(self, collector: Any) -> None:
        await self._stage._engine.abort(collector.request_id, internal=True)
