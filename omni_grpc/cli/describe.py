"""`omni-grpc describe`: what a server serves."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omni_grpc.cli.call import call_server
from omni_grpc.cli.connection import Connection, with_connection

if TYPE_CHECKING:
    from omni_grpc_client import OutputFormat, PipelineInfo, ServerInfo, StageInfo


@with_connection
def describe(
    json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for the answer.")] = 10.0,
    *,
    connection: Connection,
) -> None:
    """Tells what a server serves: pipelines, stages, outputs, limits, capabilities."""
    info = call_server(connection, lambda client: client.server_info(timeout=timeout))
    if json:
        typer.echo(json_format.dumps(dataclasses.asdict(info), ensure_ascii=False, indent=2))
        return
    console = Console()
    _head(console, info)
    for pipeline in info.pipelines:
        console.print()
        _pipeline(console, pipeline, default=pipeline.name == info.default_pipeline)


def _head(console: Console, info: ServerInfo) -> None:
    limits = info.limits
    console.print(
        f"[bold]omni-grpc {escape(info.server_version)}[/] on {escape(info.pod)}, "
        f"contract revision {info.schema_revision}; "
        f"{limits.max_requests} requests at once, messages up to "
        f"{_size(limits.max_receive_bytes)} in, {_size(limits.max_send_bytes)} out",
        highlight=False,
    )
    versions = ", ".join(f"{name} {text}" for name, text in sorted(info.library_versions.items()))
    console.print(escape(versions), highlight=False)


def _pipeline(console: Console, pipeline: PipelineInfo, *, default: bool) -> None:
    title = f"[bold]{escape(pipeline.name)}[/]" + (" (default)" if default else "")
    console.print(f"{title}: {escape(pipeline.description)}", highlight=False)
    table = Table("stage", "engine", "model", "devices", "ready", "takes", "gives")
    for stage in pipeline.stages:
        table.add_row(*(escape(cell) for cell in _row(stage)))
    console.print(table)
    able = [name for name, yes in pipeline.capabilities.items() if yes]
    unable = [name for name, yes in pipeline.capabilities.items() if yes is False]
    for label, text in (
        ("gives", "; ".join(_form(output) for output in pipeline.outputs)),
        ("can", ", ".join(able)),
        ("cannot", ", ".join(unable)),
        ("limits", _limits(pipeline)),
    ):
        console.print(f"  [bold]{label:7}[/] {escape(text) or '-'}", highlight=False)


def _row(stage: StageInfo) -> tuple[str, ...]:
    devices = ", ".join(dict.fromkeys(stage.devices))
    ready = f"{stage.ready_replicas}/{stage.replicas}"
    takes = ", ".join(stage.inputs) or "the prompt"
    return stage.name, stage.engine, stage.model or "-", devices, ready, takes, stage.output or "-"


def _form(output: OutputFormat) -> str:
    # By attribute, not by class: the classes are the client's, which is imported for calls only.
    form = output.format
    rate = getattr(form, "sample_rate_hz", 0)
    if rate:
        channels, encoding = getattr(form, "channels", 1), getattr(form, "encoding", "")
        return f"{output.modality} ({rate} Hz, {channels} channel(s), {encoding})"
    mime_type = getattr(form, "mime_type", "")
    if not mime_type:
        return output.modality
    width, height = getattr(form, "width", 0), getattr(form, "height", 0)
    size = f", {width}x{height}" if width and height else ""
    return f"{output.modality} ({mime_type}{size})"


def _limits(pipeline: PipelineInfo) -> str:
    contexts = [f"{s.name} {s.context_tokens} tokens" for s in pipeline.stages if s.context_tokens]
    return "; ".join([f"{pipeline.max_duration:g} s a request", *contexts])


def _size(number: int) -> str:
    return f"{number / (1 << 20):g} MiB"
