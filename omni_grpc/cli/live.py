"""`omni-grpc live`: a film that takes new prompts from the keyboard while it runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from omni_grpc.cli.call import CommandError, call_server
from omni_grpc.cli.connection import Connection, with_connection
from omni_grpc.cli.failure import EXIT_CODES, ExitCode, fail
from omni_grpc.cli.generate import Json, Settings, Wish
from omni_grpc.cli.streams import argument, typed

if TYPE_CHECKING:
    from omni_grpc.cli.display import Records
    from omni_grpc_client import (
        EventChanged,
        Interaction,
        OmniClient,
        Params,
        PipelineInfo,
        ServerInfo,
        SessionItem,
        VideoChunk,
    )

PREFERRED = "shapes-live"
NEEDED = ("interaction", "prompt.text", "output.video")
DEFAULT_FPS = 12.0
FIRST_PROMPT = "a large red circle on a white background"

LIVE_EPILOG = f"""Examples:

omni-grpc live "a small green ring on a black background"

omni-grpc live --out film.mp4 --frames 240 < prompts.txt

Each line of standard input is a new prompt. {EXIT_CODES} Ctrl-C ends the film, which is no failure;
twice aborts it. What came until then stays in the file."""


class Picture(Protocol):
    """Where a film goes."""

    async def show(self, chunk: VideoChunk) -> None:
        """Takes the next chunk."""

    def say(self, text: str) -> None:
        """Says something beside it."""


@dataclass(frozen=True, slots=True)
class Film:
    """What the command line asks for beside what every call has. `out` None: the terminal."""

    prompt: str
    out: Path | None
    frames: int | None
    transition: int | None
    json: bool
    quiet: bool


@with_connection
def live(
    prompt: Annotated[str, typer.Argument(help="What is shown first.")] = FIRST_PROMPT,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=".mp4 file. Without one the film is shown here."),
    ] = None,
    pipeline: Annotated[
        str, typer.Option(help=f"Pipeline; {PREFERRED}, or another film that can be steered.")
    ] = "",
    frames: Annotated[int | None, typer.Option(min=1, help="Length; else without an end.")] = None,
    transition: Annotated[
        int | None,
        typer.Option(min=0, help="Chunks over which a new prompt is blended in; 0 is a hard cut."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the film.")] = None,
    settings: Settings = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the whole call.")
    ] = None,
    json: Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Neither events nor summary.")
    ] = False,
    *,
    connection: Connection,
) -> None:
    """Shows a film while it is made, or writes it to a file. Every line that is typed changes what
    it shows."""
    if out is None and json:
        raise fail("--json needs --out: the film takes the terminal")
    if out is None and not sys.stdout.isatty():
        raise fail("stdout is no terminal: name a file with --out film.mp4")
    if out is not None and (out.suffix.lower() != ".mp4" or out.is_dir()):
        raise fail(f"--out {out}: must be a .mp4 file")
    prompt, pipeline = argument(prompt, "the prompt"), argument(pipeline, "--pipeline")
    values = tuple(argument(setting, "--set") for setting in settings or ())
    wish = Wish(prompt, None, pipeline, ("video",), (), None, None, seed, values, "", timeout)
    film = Film(prompt, out, frames, transition, json, quiet)
    call_server(connection, lambda client: run(client, wish, film))


async def run(client: OmniClient, wish: Wish, film: Film) -> None:
    """Opens the session, and shows what comes until the film ends."""
    from omni_grpc.cli.display import Records

    info = choose(await client.server_info(timeout=wish.timeout), wish.pipeline)
    async with client.interact(
        film.prompt,
        pipeline=info.name,
        stage_params=film_params(info, wish, film),
        output_modalities=["video"],
        timeout=wish.timeout,
    ) as session:
        accepted = await anext(session)
        with (
            Records(shown=film.json) as records,
            picture(film, fps_of(accepted)) as shown,
            ended_by_ctrl_c(session),
        ):
            records.show(accepted)
            typing = asyncio.create_task(steer(session, film.transition))
            try:
                frames = await watch(session, shown, records)
            finally:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)
    if film.out is not None and not film.quiet:
        typer.echo(f"wrote {film.out} · {frames} frames", err=True)


def fps_of(accepted: SessionItem) -> float:
    """The rate of the session's film, which its first event tells."""
    from omni_grpc_client import Accepted, VideoFormat

    formats = [o.format for o in accepted.outputs] if isinstance(accepted, Accepted) else []
    return next((f.fps for f in formats if isinstance(f, VideoFormat) and f.fps), DEFAULT_FPS)


async def watch(session: Interaction, shown: Picture, records: Records) -> int:
    """Shows a session to its end; how many frames there were."""
    from omni_grpc_client import EventChanged, EventState, VideoChunk

    frames = 0
    async for item in session:
        records.show(item)
        match item:
            case VideoChunk():
                frames += item.frame_count
                await shown.show(item)
            case EventChanged() if item.state is not EventState.QUEUED:
                shown.say(told(item))
    return frames


def told(change: EventChanged) -> str:
    """What became of a prompt, in a line."""
    if change.error is not None:
        return f"{change.event_id} {change.state}: {change.error.message}"
    where = "" if change.chunk is None else f" with chunk {change.chunk}"
    return f"{change.event_id} {change.state}{where}"


async def steer(session: Interaction, transition: int | None) -> None:
    """Every line that is typed is an event."""
    number = 0
    async with aclosing(lines(typed())) as prompts:
        async for line in prompts:
            number += 1
            await session.event(line, transition_chunks=transition, event_id=f"prompt {number}")


async def lines(texts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The lines of text that comes in pieces, without blank ones."""
    rest = ""
    async with aclosing(texts):
        async for text in texts:
            *whole, rest = (rest + text).split("\n")
            for line in whole:
                if line.strip():
                    yield line.strip()
    if rest.strip():
        yield rest.strip()


@contextmanager
def ended_by_ctrl_c(session: Interaction) -> Iterator[None]:
    """The first Ctrl-C ends the film, so that what was made arrives; the second aborts it."""
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        ending.append(loop.create_task(session.interrupt()))
        # The next one is a KeyboardInterrupt.
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def picture(film: Film, session_fps: float) -> Iterator[Picture]:
    """Where the film goes."""
    from omni_grpc.cli.screen import FilmFile, Screen

    if film.out is None:
        with Screen(session_fps) as screen:
            yield screen
        return
    try:
        file = film.out.open("wb")
    except OSError as error:
        raise CommandError(f"--out {film.out}: cannot write there: {error.strerror}") from None
    with file:
        yield FilmFile(file, film.quiet)


def film_params(info: PipelineInfo, wish: Wish, film: Film) -> dict[str, Params]:
    """Parameters by stage: what --set says, over what the options mean."""
    from omni_grpc.cli.plan import stage_params

    stage = next(stage.name for stage in info.stages if stage.output == "video")
    mime_type = "video/x-raw-rgb" if film.out is None else "video/mp4"
    meant = [f"{stage}.output_mime_type={mime_type}"]
    if film.frames is not None:
        meant.append(f"{stage}.frames={film.frames}")
    return stage_params(info, replace(wish, settings=(*meant, *wish.settings)))


def choose(info: ServerInfo, name: str) -> PipelineInfo:
    """The pipeline of that name, or else one whose film can be steered. Raises CommandError."""
    able = [p for p in info.pipelines if p.can(*NEEDED)]
    if name:
        found = info.pipeline(name)
        if found is None:
            raise CommandError(
                f"no pipeline {name!r} is served",
                "omni-grpc describe lists what is served",
                ExitCode.NOT_FOUND,
            )
        if found not in able:
            raise CommandError(f"pipeline {name!r} makes no film that can be steered")
        return found
    if not able:
        raise CommandError(
            "no pipeline here makes a film that can be steered", f"try: omni-grpc serve {PREFERRED}"
        )
    return min(able, key=lambda p: p.name != PREFERRED)
