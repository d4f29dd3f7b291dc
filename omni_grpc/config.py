"""Configuration: pipelines as YAML and the server's settings, checked before anything starts.

All models are frozen and refuse unknown keys; an error names the file, the path in it and the
reason."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omni_grpc.errors import ConfigError
from omni_grpc.types import Modality

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Engine = Literal[
    "vllm", "diffusion", "live", "diffusers", "codec", "whisper", "ocr", "fake", "python"
]


class Frozen(BaseModel):
    """Base of all configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
    """Tasks that one replica may hold; None: no limit of its own."""
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
        """Equal for stages that can share replicas: same name, engine, model, arguments and
        placement. What holds per request (defaults, bridges, outputs) may differ."""
        shared = {"name", "engine", "model", "devices", "replicas", "threads"}
        return self.model_dump_json(
            include=shared | {"environment", "engine_args", "lora_adapters"}
        )

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


class MediaPolicy(Frozen):
    """What media a request may bring, and from where. Sizes in bytes, times in seconds."""

    max_items: Annotated[int, Field(ge=0, le=1000)] = 16
    max_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Largest file, and most that a URI is read for."""
    max_pixels: Annotated[int, Field(ge=1)] = 40_000_000
    """Of one picture or one frame."""
    max_frames: Annotated[int, Field(ge=1)] = 1024
    max_audio_s: Seconds = 600.0
    max_decoded_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Most memory of one item once it is decoded."""
    http: bool = False
    """Whether http(s) URIs are read."""
    hosts: tuple[str, ...] = ()
    """If not empty: the only hosts that http(s) URIs may name."""
    private_networks: bool = False
    """Whether addresses that are not public may be reached (for tests and closed networks)."""
    root: str | None = None
    """Folder below which file: URIs are read; None: none are."""
    fetch_timeout: Seconds = 10.0
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 3


class ServerConfig(Frozen):
    """Settings of the server. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of AdminService and channelz, on the loopback address; None: neither is served."""
    max_receive_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 64 << 20
    max_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that run or wait at once."""
    max_tenant_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Of these, requests of one tenant."""
    max_media_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Bytes of media that running requests may have brought."""
    max_tenant_media_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Of these, bytes of one tenant."""
    queue_bytes: Annotated[int, Field(ge=1 << 16)] = 4 << 20
    """Output that waits for one client before its stages pause."""
    merge_window: Annotated[float, Field(ge=0, le=10)] = 0.0
    """How long text waits for more to join it in one message, which saves most of the server's
    work. The first text of an answer never waits, nothing else does, and an answer's end ends the
    wait."""
    write_timeout: Seconds = 30.0
    """Longest time that a client may leave an output unread."""
    drain_timeout: Seconds = 30.0
    """Longest time that running requests may go on after SIGTERM."""
    stop_timeout: Seconds = 10.0
    """Longest time that a replica may take to stop before it is killed."""
    heartbeat_timeout: Annotated[float, Field(ge=2, le=3600)] = 30.0
    """A replica that shows no sign of life for so long is lost."""
    abort_timeout: Seconds = 120.0
    """Longest time that a replica may take to free a task that was aborted (a stage may have to
    finish a step first). One that takes longer is stuck, and is lost."""
    media: MediaPolicy = MediaPolicy()
    ipc: Annotated[str, Field(pattern=r"^(ipc|tcp://[A-Za-z0-9.-]+)$")] = "ipc"
    """How replicas are reached: "ipc", or "tcp://ADDRESS" to listen on for them."""


def builtin_pipelines() -> dict[str, Path]:
    """The pipelines that the package brings, by name."""
    folder = Path(str(resources.files("omni_grpc") / "pipelines"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_pipeline(reference: str) -> PipelineConfig:
    """The pipeline named `reference`, or the one in the file at that path. Raises ConfigError."""
    builtin = builtin_pipelines()
    if reference in builtin:
        return read_pipeline(builtin[reference])
    path = Path(reference)
    if not path.is_file():
        raise ConfigError(
            f"{reference}: neither a file nor a built-in pipeline (those are {', '.join(builtin)})"
        )
    return read_pipeline(path)


def read_pipeline(path: Path) -> PipelineConfig:
    """The pipeline in a YAML file. Raises ConfigError that names file, path and reason."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a pipeline is a mapping with 'name' and 'stages'")
    try:
        return PipelineConfig.model_validate(content)
    except ValidationError as error:
        reasons = "\n".join(f"  {_where(e['loc'])}: {_reason(e)}" for e in error.errors())
        raise ConfigError(f"{path}:\n{reasons}") from None


def _where(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "(whole file)"


def _reason(error: Any) -> str:
    message: str = error["msg"]
    return message.removeprefix("Value error, ")
