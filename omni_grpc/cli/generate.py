"""`omni-grpc generate`: one request; text on stdout as it comes, sound and pictures into files."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_grpc.cli.call import call_server
from omni_grpc.cli.connection import Connection, with_connection
from omni_grpc.cli.failure import EXIT_CODES, fail
from omni_grpc.cli.streams import argument, read_text

if TYPE_CHECKING:
    from omni_grpc_client import OmniClient


class Modality(StrEnum):
    """The outputs that can be asked for."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    TENSOR = "tensor"


EPILOG = f"""Examples:

omni-grpc generate "Say hello" --out hello.wav

omni-grpc generate - --system "Be brief." --max-tokens 50 < question.txt

omni-grpc generate --audio question.wav --out answer.wav

omni-grpc generate "A red fox" --pipeline painter --out fox.png --set denoise.steps=20

{EXIT_CODES} A call that fails leaves no file behind."""


Out = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Write an output here, by extension: .wav .png .jpg .webp .mp4 .txt. Repeatable.",
    ),
]
Audio = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Sound that goes with the prompt; or a URI. Repeatable."),
]
Picture = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Picture that goes with the prompt; or a URI. Repeatable."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STAGE.FIELD=VALUE",
        help="A parameter of a stage; VALUE is JSON or plain text. Repeatable.",
    ),
]

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per event; of bytes the size only.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Neither progress nor summary.")]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for."""

    prompt: str
    system: str | None
    pipeline: str
    modalities: tuple[str, ...]
    out: tuple[Path, ...]
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    settings: tuple[str, ...]
    request_id: str
    timeout: float | None
    media: tuple[tuple[str, str], ...] = ()
    """(modality, file or URI) of what goes with the prompt."""


@with_connection
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What is asked; - reads it from stdin. May be left out with media."),
    ] = None,
    out: Out = None,
    audio: Audio = None,
    image: Picture = None,
    pipeline: Annotated[
        str, typer.Option(help="Pipeline; the server's default, or the first that takes the media.")
    ] = "",
    modality: Annotated[
        list[Modality] | None,
        typer.Option(help="Wanted output. Repeatable. Default: text, and what --out needs."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of the text's stage.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Randomness of the text's stage; 0 is greedy.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of every stage that takes one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    settings: Settings = None,
    request_id: Annotated[str, typer.Option(help="Id; the server makes one if none.")] = "",
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the whole call.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    connection: Connection,
) -> None:
    """Sends one request; prints its text as it arrives, writes sound and pictures to files.

    A summary (tokens, sound, times) goes to stderr. Ctrl-C aborts the request on the server."""
    media = [(kind, one) for kind, of in (("audio", audio), ("image", image)) for one in of or ()]
    if prompt is None and not media:
        raise fail("there is no prompt, and neither --audio nor --image in its place")
    wish = Wish(
        # The line's end is the shell's, not the prompt's.
        read_text().removesuffix("\n") if prompt == "-" else argument(prompt or "", "the prompt"),
        None if system is None else argument(system, "--system"),
        argument(pipeline, "--pipeline"),
        tuple(modality or ()),
        tuple(out or ()),
        max_tokens,
        temperature,
        seed,
        tuple(argument(setting, "--set") for setting in settings or ()),
        argument(request_id, "--request-id"),
        timeout,
        tuple(media),
    )
    call_server(connection, lambda client: run(client, wish, json=json, quiet=quiet))


async def run(client: OmniClient, wish: Wish, *, json: bool, quiet: bool) -> None:
    """Makes the call and shows its events. Files appear when it has succeeded."""
    # Here, as they need the client's package.
    from omni_grpc.cli.display import Display
    from omni_grpc.cli.outfile import open_outfile
    from omni_grpc.cli.plan import plan_call

    with ExitStack() as stack:
        files = [stack.enter_context(open_outfile(path)) for path in wish.out]
        plan = plan_call(await client.server_info(timeout=wish.timeout), wish, files)
        display = stack.enter_context(Display(json=json, quiet=quiet))
        async for event in client.stream(
            plan.prompt,
            pipeline=plan.pipeline,
            request_id=wish.request_id,
            stage_params=plan.stage_params,
            output_modalities=plan.modalities,
            media=plan.media,
            timeout=wish.timeout,
        ):
            display.show(event)
            for file in files:
                file.take(event)
        # All or none: one that is empty leaves the others unwritten too.
        for file in files:
            file.complete()
        for file in files:
            display.note(file.commit())
        display.finish()
