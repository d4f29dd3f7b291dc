"""`omni-grpc speak`: speaks standard input while it is still being written."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from omni_grpc.cli.call import CommandError, call_server
from omni_grpc.cli.connection import Connection, with_connection
from omni_grpc.cli.failure import EXIT_CODES, ExitCode, fail
from omni_grpc.cli.generate import Json, Quiet, Settings, Wish
from omni_grpc.cli.streams import argument, typed

if TYPE_CHECKING:
    from omni_grpc.cli.display import Display
    from omni_grpc_client import OmniClient, PipelineInfo, ServerInfo, StreamedRequest, WavWriter

PREFERRED = "smol-speak"

SPEAK_EPILOG = f"""Examples:

echo "Hello there." | omni-grpc speak --out hello.wav

write-a-story | omni-grpc speak --out - | aplay

{EXIT_CODES} What was spoken until then stays in the file."""


@with_connection
def speak(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="WAV file; - writes to stdout, for a player.")
    ],
    pipeline: Annotated[
        str, typer.Option(help=f"Pipeline; {PREFERRED}, or another that speaks what it is fed.")
    ] = "",
    settings: Settings = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the whole call.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    connection: Connection,
) -> None:
    """Speaks its standard input as it arrives: the first clause is heard before the second was
    written. Each line is a segment of its own.

    A summary goes to stderr. Ctrl-C aborts the request on the server."""
    if str(out) != "-" and (out.suffix.lower() != ".wav" or out.is_dir()):
        raise fail(f"--out {out}: must be a .wav file, or - for stdout")
    if json and str(out) == "-":
        raise fail("--json and --out -: stdout is for one of them")
    pipeline = argument(pipeline, "--pipeline")
    values = tuple(argument(setting, "--set") for setting in settings or ())
    wish = Wish("", None, pipeline, ("audio",), (out,), None, None, None, values, "", timeout)
    call_server(connection, lambda client: run(client, wish, out, json=json, quiet=quiet))


async def run(client: OmniClient, wish: Wish, out: Path, *, json: bool, quiet: bool) -> None:
    """Feeds stdin and writes sound, both at once."""
    from omni_grpc.cli.display import Display
    from omni_grpc.cli.plan import stage_params

    info = choose(await client.server_info(timeout=wish.timeout), wish.pipeline)
    params = stage_params(info, wish)
    with Display(json=json, quiet=quiet) as display:
        async with client.open(
            pipeline=info.name,
            stage_params=params,
            output_modalities=["audio"],
            timeout=wish.timeout,
        ) as request:
            with wav_file(out, request) as wav:
                await _both(
                    asyncio.create_task(_write(request, wav, display)),
                    asyncio.create_task(feed(request, info.input_timeout / 3)),
                )
        if str(out) != "-":
            display.note(f"wrote {out}")
        display.finish()


async def _both(*tasks: asyncio.Task[None]) -> None:
    """Returns when all are done; the first error ends them all."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write(request: StreamedRequest, wav: WavWriter, display: Display) -> None:
    from omni_grpc_client import AudioChunk

    async for event in request:
        display.show(event)
        if isinstance(event, AudioChunk):
            wav.write(event.data)
            # At once: somebody may be listening.
            wav.flush()


def choose(info: ServerInfo, name: str) -> PipelineInfo:
    """The pipeline of that name, or else the best that turns text that streams into sound: one that
    speaks it before one that answers it. Raises CommandError."""
    if name:
        if (found := info.pipeline(name)) is not None:
            return found
        raise CommandError(
            f"no pipeline {name!r} is served",
            "omni-grpc describe lists what is served",
            ExitCode.NOT_FOUND,
        )
    needed = ("resumable", "prompt.text", "output.audio")
    able = [p for p in info.pipelines if p.can(*needed)]
    if not able:
        raise CommandError(
            "no pipeline here speaks text that streams", f"try: omni-grpc serve {PREFERRED}"
        )
    return min(able, key=lambda p: (p.name != PREFERRED, _answers(p)))


def _answers(pipeline: PipelineInfo) -> bool:
    return any(stage.params_kind == "sampling" for stage in pipeline.stages)


# ---------------------------------------------------------------- stdin


async def feed(request: StreamedRequest, patience: float) -> None:
    """Feeds stdin, line by line a segment. Says that it is still there where nothing comes for
    `patience` seconds: who types may think."""
    from omni_grpc_client.pump import with_signs

    open_line = False
    async with aclosing(with_signs(typed(), patience)) as texts:
        async for text in texts:
            for line in text.splitlines(keepends=True) or [""]:
                open_line = open_line or bool(line.strip())
                ends = open_line and line.endswith("\n")
                await request.send(line, end_of_segment=ends)
                open_line = open_line and not ends
    await request.finish()


# ---------------------------------------------------------------- the file


@contextmanager
def wav_file(out: Path, request: StreamedRequest) -> Iterator[WavWriter]:
    """The WAV file, whole at any time; or stdout. What came until an error stays."""
    from omni_grpc_client import AudioFormat, WavWriter

    formats = (output.format for output in request.accepted.outputs)
    form = next((f for f in formats if isinstance(f, AudioFormat)), None)
    if form is None:
        raise CommandError("the server gave no format of sound")
    if str(out) == "-":
        stdout: BinaryIO = sys.stdout.buffer
        with WavWriter(stdout, form, streamed=True) as writer:
            writer.flush()
            yield writer
        return
    try:
        file = out.open("wb")
    except OSError as error:
        raise CommandError(f"--out {out}: cannot write there: {error.strerror}") from None
    with file, WavWriter(file, form) as writer:
        writer.flush()
        yield writer
