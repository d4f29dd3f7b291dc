"""Pipelines and their stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omni_grpc.config.base import Frozen, Name, Seconds
from omni_grpc.types import Modality

Engine = Literal[
    "vllm", "diffusion", "live", "diffusers", "codec", "whisper", "ocr", "fake", "python"
]


class RestartPolicy(Frozen):
    """How a replica that died comes back: after `backoff` seconds, doubled up to `max_backoff`, at
    most `budget` times in `window` seconds; beyond that the slot stays empty."""

    backoff: Seconds = 0.5
    max_backoff: Seconds = 30.0
    budget: Annotated[int, Field(ge=0, le=1000)] = 10
    window: Seconds = 600.0


class StageConfig(Frozen):
    """One stage of a pipeline."""

    name: Name
    engine: Engine
    model: str = ""
    """Path or name of the model; `embedded:NAME` is one that a package delivers; for engine
    `python` the stage class's import path, `package.module:Class`."""
    devices: tuple[str, ...] = ("cpu",)
    """One per replica, or one for all: "cpu", "cuda:0", "cuda:0,1" (tensor parallel over two), or
    "auto": the first GPU where there is one, else the CPU. "{replica}" in it is the replica's
    number."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads for computing on the CPU (OMP_NUM_THREADS); None: the libraries' own default."""
    environment: dict[str, str] = {}
    """Further environment variables of the replica processes."""
    engine_args: dict[str, Any] = {}
    """Arguments of the engine itself (vLLM's AsyncEngineArgs, for instance)."""
    lora_adapters: dict[str, str] = {}
    """Folders of LoRA adapters by the name that a request gives (engine `vllm`)."""
    defaults: dict[str, Any] = {}
    """Parameters that hold where a request sets none."""
    constraints: dict[str, Any] = {}
    """Parameters that a request cannot change; stop tokens here are added to the request's."""
    inputs: tuple[Name, ...] = ()
    """The stages whose outputs it takes; none for stage 0."""
    bridge: str = "forward"
    """What makes its input of those outputs: a built-in bridge, or `package.module:factory`."""
    bridge_args: dict[str, Any] = {}
    """Arguments of the bridge, by name."""
    output: Modality | None = None
    """What it gives to the client; None: nothing, its outputs only feed later stages."""
    start_timeout: Seconds = 600.0
    """Longest time until a replica is loaded and warm."""
    stage_timeout: Seconds = 120.0
    """Longest silence of a task that has input to work on."""
    restart: RestartPolicy = RestartPolicy()
    balance: Literal["least-work", "round-robin", "random"] = "least-work"
    """Which replica takes a new task."""
    max_tasks: Annotated[int, Field(ge=1)] | None = None
    """Tasks that one replica may hold; None: any number, the engine queues what it cannot run yet
    (vLLM and the codec batch and queue by themselves)."""
    max_waiting: Annotated[int, Field(ge=0, le=1_000_000)] = 64
    """New requests that may wait for a place where all replicas hold `max_tasks`; more are refused.
    Tenants take turns. Requests that run already go first, and are never refused."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each of its devices' memory that one replica takes (vLLM's gpu_memory_utilization).
    Shares of replicas on one device are summed when the server starts, and must fit."""

    @model_validator(mode="after")
    def _check(self) -> StageConfig:
        if len(self.devices) not in (1, self.replicas):
            raise ValueError(
                f"devices: give one for all {self.replicas} replicas, or one for each, "
                f"not {len(self.devices)}"
            )
        if self.engine == "python" and ":" not in self.model:
            raise ValueError(
                "model: engine 'python' needs the class's import path, 'package.module:Class'"
            )
        if self.lora_adapters and self.engine != "vllm":
            raise ValueError(f"lora_adapters: engine {self.engine!r} has none")
        if self.engine not in ("fake", "python") and not self.model:
            raise ValueError(f"model: engine {self.engine!r} needs a model")
        return self

    def identity(self) -> str:
        """Equal for stages that can share replicas: same name, engine, model, arguments, placement
        and limits. What holds per request (defaults, bridges, outputs, timeouts) may differ."""
        what = {"name", "engine", "model", "engine_args", "lora_adapters"}
        where = {"devices", "replicas", "threads", "environment", "memory_fraction"}
        limits = {"balance", "max_tasks", "max_waiting", "restart", "start_timeout"}
        return self.model_dump_json(include=what | where | limits)

    def device(self, replica: int) -> str:
        """The device of a replica, "auto" resolved."""
        device = self.devices[replica if len(self.devices) > 1 else 0]
        device = device.replace("{replica}", str(replica))
        if device != "auto":
            return device
        return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"


class PipelineConfig(Frozen):
    """A pipeline: stages in the order in which data flows, the first one takes the prompt."""

    name: Name
    description: str = ""
    example: str = "Hello there."
    """A text prompt to try."""
    inputs: tuple[Modality, ...] = (Modality.TEXT,)
    """What a prompt may hold."""
    prompts: tuple[Literal["text", "token_ids", "messages", "embeds", "media"], ...] = ("text",)
    """The forms of `Prompt.content` that stage 0 takes; "media" is none of them: media alone."""
    guidance: bool = False
    """Whether a prompt may have a `negative_text`."""
    transform: str | None = None
    """What makes stage 0's prompt of the client's: `package.module:function`."""
    expansion: str | None = None
    """What gives a request companions for guidance: `guidance`, or `package.module:function`."""
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1)]
    max_duration: Seconds = 600.0
    """Longest time that a request may take; also the deadline of one that brings none."""
    retry: bool = True
    """Whether a request that has given nothing goes to another replica, once, when its own is
    lost."""
    input_timeout: Seconds = 60.0
    """Longest wait for the next input of a resumable request."""

    @model_validator(mode="after")
    def _check(self) -> PipelineConfig:
        seen: set[str] = set()
        for place, stage in enumerate(self.stages):
            where = f"stages[{place}] ({stage.name})"
            if stage.name in seen:
                raise ValueError(f"{where}: the name is taken by an earlier stage")
            if bool(stage.inputs) != bool(place):
                raise ValueError(
                    f"{where}: the first stage takes the prompt and has no inputs, others have some"
                )
            for source in stage.inputs:
                if source not in seen:
                    raise ValueError(f"{where}: inputs: {source!r} is not an earlier stage")
            seen.add(stage.name)
        self._check_outputs()
        return self

    def _check_outputs(self) -> None:
        outputs = [stage.output for stage in self.stages if stage.output is not None]
        if not outputs:
            raise ValueError("no stage has an output: the client would get nothing")
        if len(set(outputs)) != len(outputs):
            raise ValueError("two stages have the same output modality")
        fed = {source for stage in self.stages for source in stage.inputs}
        for place, stage in enumerate(self.stages):
            if stage.output is None and stage.name not in fed:
                raise ValueError(f"stages[{place}] ({stage.name}): nobody takes its output")
