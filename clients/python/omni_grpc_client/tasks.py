"""What people come for, in one call: text spoken while it is written, a picture, a film that is
steered. Methods of OmniClient; see also conversation.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from omni_grpc.v1.params_pb2 import DiffusionParams
from omni_grpc.v1.prompt_pb2 import Media
from omni_grpc_client.errors import MissingOutputError, NotFoundError, UnservedError
from omni_grpc_client.events import AudioChunk, Event
from omni_grpc_client.feed import StreamedRequest
from omni_grpc_client.info import PipelineInfo
from omni_grpc_client.interaction import Interaction
from omni_grpc_client.media import Image, Modality
from omni_grpc_client.pump import pumped, with_signs
from omni_grpc_client.request import Params, PromptLike

if TYPE_CHECKING:
    from omni_grpc_client.client import OmniClient

Texts = str | Iterable[str] | AsyncIterable[str]
"""Text; or text in pieces, while it is written."""

SPEAKING = ("resumable", "prompt.text", "output.audio")
DRAWING = ("output.image",)
FILMING = ("interaction", "output.video")

DEFAULT_PATIENCE_S = 10.0
"""Of a pipeline that does not say how long it waits for input."""


async def speak(
    self: OmniClient,
    text: Texts,
    *,
    pipeline: str = "",
    request_id: str = "",
    stage_params: Mapping[str, Params] | None = None,
    timeout: float | None = None,
) -> AsyncGenerator[AudioChunk, None]:
    """Speaks text while it is being written: the first chunks of sound come before the last text.

    `text` in pieces of any size; an iterable that is not async is asked for its items in a thread
    of its own. `pipeline` "": one that speaks what it is fed, before one that answers it.
    `timeout` in seconds for all of it. Leaving the iteration aborts the request and stops asking
    for text. What the text's own iteration raises is raised here, and aborts the request too.

    Raises UnservedError where no pipeline speaks, and what OmniClient.stream and Feeder.send
    do."""
    served = await chosen(self, pipeline, SPEAKING, timeout)
    # A feeder that is silent for longer counts as lost.
    patience = (served.input_timeout if served else 0.0) / 3 or DEFAULT_PATIENCE_S
    opened = self.open(
        pipeline=served.name if served else pipeline,
        request_id=request_id,
        stage_params=stage_params,
        output_modalities=[Modality.AUDIO],
        timeout=timeout,
    )
    async with opened as request:
        feeding = asyncio.create_task(_fed(request, text, patience))
        async with aclosing(_while_fed(request, feeding)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    yield event


async def _fed(request: StreamedRequest, text: Texts, patience: float) -> None:
    pieces = pumped([text] if isinstance(text, str) else text)
    async with aclosing(with_signs(pieces, patience)) as texts:
        async for piece in texts:
            await request.send(piece)
    await request.finish()


async def _while_fed(
    request: StreamedRequest, feeding: asyncio.Task[None]
) -> AsyncGenerator[Event, None]:
    """The request's events; an error of whoever feeds it ends them."""
    coming: asyncio.Future[Event | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(request, None))
            while not coming.done():
                # Of a request that is not there any more its reader hears how it has ended.
                if feeding.done() and not isinstance(feeding.exception(), NotFoundError):
                    feeding.result()
                waited: list[asyncio.Future[Any]] = [coming]
                if not feeding.done():
                    waited.append(feeding)
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if (event := coming.result()) is None:
                return
            yield event
    finally:
        left: list[asyncio.Future[Any]] = [feeding] if coming is None else [feeding, coming]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def draw(
    self: OmniClient,
    prompt: PromptLike,
    *,
    pipeline: str = "",
    request_id: str = "",
    stage_params: Mapping[str, Params] | None = None,
    media: Iterable[Media] = (),
    timeout: float | None = None,
) -> Image:
    """The picture that the prompt describes, the first where there are several.

    `pipeline` "": the server's default if it draws, else the first that does. Raises UnservedError
    where none does, MissingOutputError where no picture came, and what OmniClient.stream does."""
    served = await chosen(self, pipeline, DRAWING, timeout)
    answer = await self.generate(
        prompt,
        pipeline=served.name if served else pipeline,
        request_id=request_id,
        stage_params=stage_params,
        output_modalities=[Modality.IMAGE],
        media=media,
        timeout=timeout,
    )
    if not answer.images:
        raise MissingOutputError("the request succeeded, but no picture came")
    return answer.images[0]


@asynccontextmanager
async def live(
    self: OmniClient,
    prompt: PromptLike,
    *,
    pipeline: str = "",
    request_id: str = "",
    frames: int | None = None,
    seed: int | None = None,
    mime_type: str = "video/mp4",
    stage_params: Mapping[str, Params] | None = None,
    timeout: float | None = None,
) -> AsyncIterator[Interaction]:
    """A film that is steered while it is made: iterate the session for VideoChunk and EventChanged,
    `await session.event("...")` changes what is shown, `await session.interrupt()` ends the film.

    `frames`: its length (None: without an end, up to `timeout` seconds and the pipeline's longest
    duration); `mime_type` "video/mp4" (its chunks one after the other are a file, whole after each;
    see VideoWriter) or "video/x-raw-rgb" (frames of height x width x 3 bytes). They and `seed` are
    for a stage that takes DiffusionParams, under what `stage_params` says. `pipeline` "": the first
    that makes such films. Leaving the block aborts the request.

    Raises UnservedError where no pipeline makes such films, and what OmniClient.interact does."""
    served = await chosen(self, pipeline, FILMING, timeout)
    params = dict(stage_params or {})
    if served is not None:
        wanted = DiffusionParams(frames=frames, seed=seed, output_mime_type=mime_type)
        _fill(params, served, wanted)
    session = self.interact(
        prompt,
        pipeline=served.name if served else pipeline,
        request_id=request_id,
        stage_params=params,
        output_modalities=[Modality.VIDEO],
        timeout=timeout,
    )
    async with session as film:
        yield film


def _fill(params: dict[str, Params], pipeline: PipelineInfo, wanted: DiffusionParams) -> None:
    """Sets what is wanted of the stage that makes the film, where the caller left it unset."""
    for stage in pipeline.stages:
        if stage.output is not Modality.VIDEO or stage.params_kind != "diffusion":
            continue
        given = params.get(stage.name)
        if isinstance(given, DiffusionParams):
            wanted.MergeFrom(given)
        if given is None or isinstance(given, DiffusionParams):
            params[stage.name] = wanted


async def chosen(
    client: OmniClient, name: str, needs: tuple[str, ...], timeout: float | None
) -> PipelineInfo | None:
    """The pipeline of that name, or else the best that has these capabilities. None for a name that
    is not served: the server says so best. Raises UnservedError where none has them."""
    info = await client.server_info(timeout=timeout)
    if name:
        return info.pipeline(name)
    able = [pipeline for pipeline in info.pipelines if pipeline.can(*needs)]
    if not able:
        raise UnservedError(f"no pipeline here has all of: {', '.join(needs)}")
    return min(able, key=lambda one: _rank(one, info.default_pipeline, needs))


def _rank(pipeline: PipelineInfo, default: str, needs: tuple[str, ...]) -> tuple[Any, ...]:
    """Who is to speak a text should not answer it; else the default pipeline is the first."""
    answers = any(stage.params_kind == "sampling" for stage in pipeline.stages)
    return (needs is SPEAKING and answers, pipeline.name != default)
