"""From a Request to an admitted Run, or to the error that refuses it. Nothing is left of a request
that is refused.

What can be known without a model is checked here, before anything is bound; what only the model
knows (tokens, context, its own limits) is checked by stage 0's `prepare`, before the client hears
`accepted`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from omni_grpc.config import ServerConfig
from omni_grpc.errors import (
    Draining,
    InvalidField,
    LoraNotFound,
    NotImplementedYet,
    NotSupported,
    OmniError,
    PipelineNotFound,
    QueueFull,
    Violation,
)
from omni_grpc.orchestrator import AbortOutcome, Orchestrator
from omni_grpc.params import FIELD_BY_KIND, check_honoured, merge, parse_fake_script
from omni_grpc.pool import SlotStatistics, StagePool
from omni_grpc.run import Plan, Run
from omni_grpc.topology import Pipeline, StageNode
from omni_grpc.types import (
    CustomParams,
    Messages,
    Params,
    Prompt,
    Request,
    RequestOptions,
    SamplingParams,
    Tensor,
    Text,
    TokenIds,
)

ABORT_TIMEOUT_S = 5.0
RETRY_S = 1.0
"""When to come back to a server that is full. An estimate from the drain rate takes its place
later."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Load of one stage."""

    pipelines: tuple[str, ...]
    stage: str
    replicas: list[SlotStatistics]


class Engine:
    """The service without gRPC: submit, find, abort, tell."""

    def __init__(
        self, pipelines: Mapping[str, Pipeline], default: str, settings: ServerConfig
    ) -> None:
        self.pipelines = pipelines
        self.default = default
        self.settings = settings
        self.orchestrator = Orchestrator(settings.queue_bytes)
        self.draining = False

    # ------------------------------------------------------------ requests

    async def submit(self, request: Request) -> Run:
        """Admits a request: it is enqueued when this returns, and its outputs come from the Run.

        Raises OmniError where it is refused. Whatever is raised, cancellation included, nothing of
        it is left."""
        if self.draining:
            raise Draining("the server is about to stop", retry_after_s=RETRY_S)
        plan = self.plan(request)
        if len(self.orchestrator) >= self.settings.max_requests:
            raise QueueFull(
                f"the server holds {self.settings.max_requests} requests, its most",
                retry_after_s=RETRY_S,
            )
        run = self.orchestrator.open(plan)
        await run.admit()
        return run

    def plan(self, request: Request) -> Plan:
        """The request checked against its pipeline. Binds nothing."""
        pipeline = self._pipeline(request.pipeline)
        finals = pipeline.finals(request.output_modalities, "output_modalities")
        needed = pipeline.needed(finals)
        check_prompt(request, pipeline)
        check_options(request.options, pipeline.entry)
        requested, paths = _requested_params(request, pipeline)
        params = {}
        for node in pipeline.stages.values():
            path = paths.get(node.name, f"stage_params({node.name})")
            params[node.name] = merge(
                node.defaults, requested.get(node.name), node.constraints, path
            )
            _check_answers(params[node.name], node, needed, path)
        limit = pipeline.config.max_duration
        return Plan(
            request=request if request.request_id else _with_id(request, f"req-{uuid.uuid4().hex}"),
            pipeline=pipeline,
            finals=finals,
            needed=needed,
            params=params,
            timeout_s=min(limit, request.timeout_s) if request.timeout_s is not None else limit,
            params_paths=paths,
        )

    def _pipeline(self, name: str) -> Pipeline:
        name = name or self.default
        if name not in self.pipelines:
            known = ", ".join(self.pipelines)
            raise PipelineNotFound(f"no pipeline {name!r} is served here, only {known}")
        return self.pipelines[name]

    async def abort(self, request_ids: list[str]) -> list[AbortOutcome]:
        """Aborts requests; returns when their stages are free, one outcome per id."""
        return await self.orchestrator.abort(request_ids, ABORT_TIMEOUT_S)

    # ------------------------------------------------------------ the whole

    @property
    def pools(self) -> list[StagePool]:
        """Every pool once."""
        pools = {id(n.pool): n.pool for p in self.pipelines.values() for n in p.stages.values()}
        return list(pools.values())

    def load(self) -> list[StageStatistics]:
        """The present load; a shared stage once."""
        users: dict[int, list[str]] = {}
        for pipeline in self.pipelines.values():
            for node in pipeline.stages.values():
                users.setdefault(id(node.pool), []).append(pipeline.name)
        return [
            StageStatistics(tuple(users[id(pool)]), pool.config.name, pool.statistics())
            for pool in self.pools
        ]

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets the running ones finish for `timeout_s`, then ends the
        rest."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.orchestrator.idle()
        self.orchestrator.close_all(Draining("the server stopped"))


def check_prompt(request: Request, pipeline: Pipeline) -> None:
    """Whether the pipeline takes such a prompt."""
    prompt = request.prompt
    if request.resumable:
        raise NotImplementedYet("resumable requests are not served yet")
    if prompt.empty:
        raise InvalidField("prompt", "is required")
    form = _prompt_form(prompt)
    if form is not None and form not in pipeline.config.prompts:
        raise _unsupported(f"prompt.{form}", f"pipeline {pipeline.name!r} does not take {form}")
    media = list(prompt.media)
    if isinstance(prompt.content, Messages):
        parts = (part for message in prompt.content.messages for part in message.parts)
        media += [part for part in parts if not isinstance(part, Text)]
    for item in media:
        if item.modality not in pipeline.config.inputs:
            raise _unsupported(
                "prompt.media", f"pipeline {pipeline.name!r} does not take {item.modality.value}"
            )
    if prompt.negative_text is not None:
        raise _unsupported("prompt.negative_text", f"pipeline {pipeline.name!r} has no guidance")


def _prompt_form(prompt: Prompt) -> str | None:
    match prompt.content:
        case Text():
            return "text"
        case TokenIds():
            return "token_ids"
        case Messages():
            return "messages"
        case Tensor():
            return "embeds"
    return None


def check_options(options: RequestOptions, entry: StageNode) -> None:
    """Whether stage 0 can honour what goes with the prompt."""
    if options.lora is not None:
        raise LoraNotFound(f"stage {entry.name!r} has no adapter {options.lora!r}")
    if entry.config.engine == "vllm":
        return
    for name in (
        "priority",
        "data_parallel_rank",
        "reasoning_ended",
        "tokenization",
        "cache_salt",
    ):
        if getattr(options, name) is not None:
            raise _unsupported(name, f"engine {entry.config.engine!r} cannot honour it")


def _requested_params(
    request: Request, pipeline: Pipeline
) -> tuple[dict[str, Params], dict[str, str]]:
    requested: dict[str, Params] = {}
    paths: dict[str, str] = {}
    for place, entry in enumerate(request.stage_params):
        where = f"stage_params[{place}]"
        if entry.stage not in pipeline.stages:
            known = ", ".join(pipeline.stages)
            raise InvalidField(
                f"{where}.stage",
                f"pipeline {pipeline.name!r} has no stage {entry.stage!r}, only {known}",
            )
        if entry.stage in requested:
            raise InvalidField(f"{where}.stage", f"stage {entry.stage!r} is repeated")
        node = pipeline.stages[entry.stage]
        given = FIELD_BY_KIND[type(entry.params)]
        if not isinstance(entry.params, node.kind):
            raise InvalidField(
                f"{where}.{given}", f"stage {entry.stage!r} takes {node.params_field!r} parameters"
            )
        path = f"{where}.{given}"
        if node.config.engine == "fake" and isinstance(entry.params, CustomParams):
            parse_fake_script(entry.params.values, path)
        honoured = node.pool.facts.params
        if honoured is not None and not isinstance(entry.params, CustomParams):
            check_honoured(entry.params, honoured, path)
        requested[entry.stage], paths[entry.stage] = entry.params, path
    return requested, paths


def _check_answers(
    params: Params, node: StageNode, needed: tuple[StageNode, ...], path: str
) -> None:
    if isinstance(params, SamplingParams) and (params.n or 1) > 1:
        taken = [other.name for other in needed if node.name in other.config.inputs]
        if taken:
            raise InvalidField(f"{path}.n", f"must be 1 where stage {taken[0]!r} takes the answer")


def _unsupported(field: str, description: str) -> OmniError:
    return NotSupported(f"{field}: {description}", violations=(Violation(field, description),))


def _with_id(request: Request, request_id: str) -> Request:
    return Request(
        request_id,
        request.pipeline,
        request.prompt,
        request.stage_params,
        request.output_modalities,
        request.resumable,
        request.options,
        request.timeout_s,
    )
