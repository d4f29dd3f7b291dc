"""The fronts under test: how each is started, and how it is spoken to.

All serve one model with the same engine arguments, each with an engine of its own. While one is
measured the others stand still."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.load import Load
from bench.processes import Measured, environment, free_port

CPU_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "block_size": 128,
    "num_gpu_blocks_override": 1024,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "generation_config": "vllm",
    "seed": 0,
}
CUDA_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    # Five engines share one device.
    "gpu_memory_utilization": 0.15,
    "load_format": "dummy",
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}
CUDA = Path("/dev/nvidia0").exists()
ENGINE_ARGS = CUDA_ARGS if CUDA else CPU_ARGS
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0-1"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the benchmark keeps its files, and how much load it makes."""

    cache: Path
    logs: Path
    model: Path
    generators: int
    """Load processes per front."""


@dataclass(slots=True)
class Front:
    """A front that runs. `process` None: it has none beside its load generator."""

    name: str
    load: Load
    process: Measured | None
    load_s: float = 0.0
    """From the start of its process to its first answer."""


Starter = Callable[[Setting, Path], tuple[list[str], dict[str, str], dict[str, str]]]
"""Command, further environment, and targets by protocol."""


def _flags() -> list[str]:
    flags = []
    for name, value in ENGINE_ARGS.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _omni(setting: Setting, log: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    stage = {
        "name": "llm",
        "engine": "vllm",
        "model": str(setting.model),
        "devices": ["auto"],
        "engine_args": {**ENGINE_ARGS, "chat": False},
        "environment": ENGINE_ENVIRONMENT,
        "output": "text",
    }
    # The stage brings this one itself.
    del stage["engine_args"]["disable_log_stats"]  # type: ignore[attr-defined]
    file = log.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({"name": "bench", "stages": [stage]}))
    port = free_port()
    command = [sys.executable, "-m", "omni_grpc.cli", "serve"]
    command += ["--pipeline", str(file), "--port", str(port)]
    return command, {}, {"omni": f"127.0.0.1:{port}"}


def _servicer(setting: Setting, log: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    port = free_port()
    command = [sys.executable, "-m", _launcher()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(setting.model)]
    path = {"PYTHONPATH": str(setting.cache / "fronts" / "smg")}
    return [*command, *_flags()], path, {"servicer": f"127.0.0.1:{port}"}


def _launcher() -> str:
    """vLLM's gRPC server, which has moved between its versions."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("vllm.entrypoints.launchers.grpc_server"):
            return "vllm.entrypoints.launchers.grpc_server"
    return "vllm.entrypoints.grpc_server"


def _serve(setting: Setting, port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setting.model)]
    command += ["--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, *_flags()]


def _http(setting: Setting, log: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    port = free_port()
    command = [*_serve(setting, port), "--uvicorn-log-level", "warning"]
    return command, {}, {"http": f"127.0.0.1:{port}"}


def _rust(setting: Setting, log: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    port, grpc_port = free_port(), free_port()
    folder = setting.cache / "fronts" / "rust"
    more = {"VLLM_USE_RUST_FRONTEND": "1"}
    if not CUDA:
        # The CPU build has none of its own.
        more |= {
            "VLLM_RUST_FRONTEND_PATH": str(folder / "vllm-rs"),
            "PYTHONPATH": str(folder / "site"),
        }
    # The CUDA host's vLLM (0.26) has a Rust front for HTTP only.
    more_flags = [] if CUDA else ["--grpc-port", str(grpc_port)]
    command = [*_serve(setting, port), *more_flags]
    return command, more, {"rust": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{port}"}


SERVERS: dict[str, Starter] = {"omni": _omni, "grpc": _servicer, "http": _http, "rust": _rust}
FRONTS = {
    "asyncllm": ("", "asyncllm"),
    "omni": ("omni", "omni"),
    "grpc": ("grpc", "servicer"),
    "http": ("http", "http"),
    "rust": ("rust", "rust"),
    "rust-http": ("rust", "http"),
}
"""Each front by name: whose server it belongs to, and its protocol."""


@contextmanager
def running(setting: Setting, names: list[str]) -> Iterator[list[Front]]:
    """These fronts, each served once."""
    with ExitStack() as stack:
        servers: dict[str, tuple[Measured, dict[str, str]]] = {}
        fronts = []
        for name in names:
            server, protocol = FRONTS[name]
            if server and server not in servers:
                log = setting.logs / f"{server}.log"
                command, more, targets = SERVERS[server](setting, log)
                env = environment(**ENGINE_ENVIRONMENT, **more)
                servers[server] = stack.enter_context(Measured(command, log, env)), targets
            process, targets = servers.get(server, (None, {}))
            front = _front(stack, setting, name, protocol, process, targets)
            # One loads after the other: engines that share a GPU measure what memory is free.
            print(f"    starting {front.name}", flush=True)
            front.load.ready()
            fronts.append(front)
        yield fronts


def _front(
    stack: ExitStack,
    setting: Setting,
    name: str,
    protocol: str,
    process: Measured | None,
    targets: dict[str, str],
) -> Front:
    target, count = targets.get(protocol, ""), setting.generators
    if process is None:
        target, count = json.dumps({"model": str(setting.model), **ENGINE_ARGS}), 1
    log = setting.logs / f"load-{name}.log"
    load = Load(protocol, target, count, environment(**ENGINE_ENVIRONMENT), log)
    stack.callback(load.close)
    return Front(name, load, process)
