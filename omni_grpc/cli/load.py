"""`omni-grpc load`: how busy a server is."""

from __future__ import annotations

import dataclasses
import json as json_format
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from omni_grpc.cli.call import call_server
from omni_grpc.cli.connection import Connection, with_connection

if TYPE_CHECKING:
    from omni_grpc_client import OmniClient, ReplicaLoad, StageLoad

DEFAULT_TIMEOUT_S = 10.0


@with_connection
def load(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Goes on with every change, until Ctrl-C.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per stage and moment.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the answer; for all of --watch.")
    ] = None,
    *,
    connection: Connection,
) -> None:
    """Tells the present load of every stage and replica. What is not known is shown as -."""
    if watch:
        call_server(connection, lambda client: _watched(client, timeout, json=json))
        return
    limit = DEFAULT_TIMEOUT_S if timeout is None else timeout
    stages = call_server(connection, lambda client: client.load(timeout=limit))
    if json:
        _json(stages)
    else:
        Console().print(table(stages))


async def _watched(client: OmniClient, timeout: float | None, *, json: bool) -> None:
    """Shows the load as it changes: on a terminal in one place."""
    console = Console()
    async with aclosing(client.watch_load(timeout=timeout)) as moments:
        if json or not console.is_terminal:
            async for stages in moments:
                if json:
                    _json(stages)
                else:
                    console.print(table(stages))
            return
        with Live(console=console, auto_refresh=False) as live:
            async for stages in moments:
                live.update(table(stages), refresh=True)


def _json(stages: tuple[StageLoad, ...]) -> None:
    for stage in stages:
        typer.echo(json_format.dumps(dataclasses.asdict(stage), ensure_ascii=False))


def table(stages: tuple[StageLoad, ...]) -> Table:
    """A row per replica."""
    made = Table(*COLUMNS)
    for stage in stages:
        for replica in stage.replicas:
            made.add_row(*(escape(cell) for cell in _row(stage, replica)))
    return made


COLUMNS = (
    "stage",
    "pipelines",
    "replica",
    "state",
    "restarts",
    "running",
    "waiting",
    "capacity",
    "work left",
    "KV cache",
    "measured",
)


def _row(stage: StageLoad, replica: ReplicaLoad) -> tuple[str, ...]:
    return (
        stage.stage,
        ", ".join(stage.pipelines),
        str(replica.replica),
        "ready" if replica.ready else "not ready",
        str(replica.restarts),
        _known(replica.running),
        _known(replica.waiting),
        _known(replica.capacity),
        _known(replica.work_left, "{:.0f}"),
        _known(replica.kv_cache_use, "{:.0%}"),
        _known(replica.sample_age_ms, "{:.0f} ms ago"),
    )


def _known(value: float | None, form: str = "{}") -> str:
    """Not known is not 0."""
    return "-" if value is None else form.format(value)
