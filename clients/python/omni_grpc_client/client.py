"""The client: one channel, one method per rpc."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from omni_grpc.v1 import service_pb2
from omni_grpc.v1.prompt_pb2 import Media
from omni_grpc.v1.service_pb2 import AddRequestRequest
from omni_grpc_client import conversation, tasks
from omni_grpc_client.answer import Answer, AnswerBuilder
from omni_grpc_client.credentials import authorization
from omni_grpc_client.errors import ProtocolError, decode_error
from omni_grpc_client.events import Accepted, Event
from omni_grpc_client.feed import Feeder, StreamedRequest
from omni_grpc_client.info import ServerInfo, StageLoad, decode_load, decode_server_info
from omni_grpc_client.interaction import Interaction, begin_session
from omni_grpc_client.lines import Lines, Pods
from omni_grpc_client.media import Modality, decode_enum
from omni_grpc_client.order import read_events
from omni_grpc_client.request import Params, PromptLike, mirrored, whole_request
from omni_grpc_client.retry import NO_RETRY, RetryPolicy, attempted

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A model can think for minutes in silence: pings tell a dead peer from a busy one, and keep
    # what is between from forgetting the connection. The server takes one every 10 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # What counts in grpcio 1.85; the one above is for others.
    ("grpc.http2.ping_timeout_ms", 20_000),
)
# Message limits stay gRPC's own: no message of the contract is larger than 1 MiB.

DEFAULT_RETRY = RetryPolicy()


class AbortOutcome(StrEnum):
    """What aborting a request did."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


class OmniClient:
    """A client of one server, `async with OmniClient("localhost:50051") as client`.

    One client serves any number of calls at once. Every method raises OmniCallError. `credentials`
    is for TLS (see tls_credentials); none: plain text. `token` goes with every call; in plain text
    to this machine only, unless `insecure_token` (InsecureTokenError). `retry` says when a refused
    call is made again (None: never); a call's `timeout` is for all of its attempts. `pods` tells
    where a pod is reached, by its name: `feed`, `attach` and `abort` of a request that this client
    has opened then go to the pod that runs it (None: to `target`, where a balancer must know).
    `options` are gRPC's channel options, over CHANNEL_OPTIONS."""

    def __init__(
        self,
        target: str = "localhost:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        insecure_token: bool = False,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        pods: Pods | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.target = target
        self.retry = retry or NO_RETRY
        protected = credentials is not None or insecure_token
        self._authorization = authorization(token, target, protected=protected)
        self._lines = Lines(
            target,
            credentials,
            tuple({**dict(CHANNEL_OPTIONS), **(options or {})}.items()),
            pods,
            lambda other: authorization(token, other, protected=protected),
        )

    async def __aenter__(self) -> Self:
        self._lines.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel: calls that still run are cancelled, on the server too. Idempotent."""
        await self._lines.close()

    speak = tasks.speak
    draw = tasks.draw
    live = tasks.live
    converse = conversation.converse

    async def stream(
        self,
        prompt: PromptLike | AddRequestRequest,
        *,
        pipeline: str = "",
        request_id: str = "",
        stage_params: Mapping[str, Params] | None = None,
        output_modalities: Iterable[Modality | str] = (),
        media: Iterable[Media] = (),
        timeout: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Submits a request and yields its events: Accepted first, Finished last.

        `media` (see make_media) go with the prompt: beside its text, in the last turn of a
        conversation, or alone where the prompt is "".
        An AddRequestRequest is sent as it is, the parameters beside it must be unset. `timeout` in
        seconds; None: the pipeline's longest duration. Breaking out of the iteration, or cancelling
        the task, aborts the request on the server; what came before stays valid. With
        `contextlib.aclosing` that happens at a place of your choice, without it as soon as
        the generator is forgotten.

        Raises OmniCallError when the server refuses or fails the request, ProtocolError when it
        breaks the contract's order, ValueError for what the contract cannot express."""
        request = whole_request(
            prompt, pipeline, request_id, stage_params, output_modalities, tuple(media)
        )
        accepted, events, pod = await self._submit(request, timeout)
        with self._lines.running(accepted.request_id, pod):
            async with aclosing(events):
                yield accepted
                async for event in events:
                    yield event

    async def generate(
        self,
        prompt: PromptLike | AddRequestRequest,
        *,
        pipeline: str = "",
        request_id: str = "",
        stage_params: Mapping[str, Params] | None = None,
        output_modalities: Iterable[Modality | str] = (),
        media: Iterable[Media] = (),
        timeout: float | None = None,
    ) -> Answer:
        """The whole answer; parameters, errors and cancelling as for `stream`."""
        builder = AnswerBuilder()
        events = self.stream(
            prompt,
            pipeline=pipeline,
            request_id=request_id,
            stage_params=stage_params,
            output_modalities=output_modalities,
            media=media,
            timeout=timeout,
        )
        async with aclosing(events):
            async for event in events:
                builder.add(event)
        return builder.build()

    @asynccontextmanager
    async def open(
        self,
        prompt: PromptLike | AddRequestRequest = "",
        *,
        pipeline: str = "",
        request_id: str = "",
        stage_params: Mapping[str, Params] | None = None,
        output_modalities: Iterable[Modality | str] = (),
        timeout: float | None = None,
    ) -> AsyncIterator[StreamedRequest]:
        """Opens a request whose input streams; what it begins with may be empty.

        Entered when the server has accepted it. Leaving the block aborts the request, unless it has
        finished. Parameters and errors as for `stream`; see StreamedRequest."""
        request = whole_request(prompt, pipeline, request_id, stage_params, output_modalities, ())
        if request is prompt and not request.resumable:
            raise ValueError("a request whose input streams must be resumable")
        if not isinstance(prompt, AddRequestRequest):
            request.resumable = True
            if not prompt:
                request.ClearField("prompt")
        accepted, events, pod = await self._submit(request, timeout)
        with self._lines.running(accepted.request_id, pod):
            async with aclosing(events), self.feed(accepted.request_id) as feeder:
                yield StreamedRequest(events, accepted, feeder)

    def feed(self, request_id: str, *, next_seq: int = 0) -> Feeder:
        """A feeder of a resumable request that runs, whoever opened it; to be used as a context
        manager. `next_seq` is the number of its first chunk."""
        stub = self._lines.stub(request_id)
        return Feeder(
            lambda: stub.StreamingUpdate(metadata=self._metadata(request_id)), request_id, next_seq
        )

    @asynccontextmanager
    async def interact(
        self,
        prompt: PromptLike | AddRequestRequest = "",
        *,
        pipeline: str = "",
        request_id: str = "",
        stage_params: Mapping[str, Params] | None = None,
        output_modalities: Iterable[Modality | str] = (),
        media: Iterable[Media] = (),
        resumable: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[Interaction]:
        """Opens a request in a session of its own, to steer, feed and interrupt it while it runs.

        `resumable`: input goes on through the session, and may begin with nothing. Entered when the
        request was admitted. Leaving the block aborts the request, unless it has finished. Other
        parameters and errors as for `stream`; see Interaction."""
        request = whole_request(
            prompt, pipeline, request_id, stage_params, output_modalities, tuple(media)
        )
        if request is prompt and resumable:
            raise ValueError("a whole AddRequestRequest is sent as it is: set its own resumable")
        if request is not prompt:
            request.resumable = resumable
            if resumable and not prompt and not request.prompt.media:
                request.ClearField("prompt")
        setup = service_pb2.InteractionSetup(open=request)
        session, pod = await self._set_up(setup, request.request_id, timeout)
        try:
            with self._lines.running(session.request_id, pod):
                yield session
        finally:
            await session.close()

    @asynccontextmanager
    async def attach(
        self, request_id: str, *, receive_outputs: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Interaction]:
        """A session on a request that runs, whoever opened it. `receive_outputs`: its events come
        here too, from now on. Leaving the block leaves the request as it is."""
        attach = service_pb2.Attach(request_id=request_id, receive_outputs=receive_outputs)
        setup = service_pb2.InteractionSetup(attach=attach)
        session, _ = await self._set_up(setup, request_id, timeout)
        try:
            yield session
        finally:
            await session.close()

    async def abort(
        self, request_ids: str | Iterable[str], *, timeout: float | None = None
    ) -> dict[str, AbortOutcome]:
        """Aborts requests, and returns when each is aborted: what became of it, by id."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        request = service_pb2.AbortRequest(request_ids=ids)
        # Several ids may be on several pods: behind a balancer that chooses by id, abort each.
        mirrored = ids[0] if len(ids) == 1 else ""
        response: service_pb2.AbortResponse = await self._unary("Abort", request, timeout, mirrored)
        return {result.request_id: _outcome(result.outcome) for result in response.results}

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """What is served: pipelines, stages, modalities, formats, limits, capabilities."""
        request = service_pb2.GetServerInfoRequest()
        return decode_server_info(await self._unary("GetServerInfo", request, timeout))

    async def load(self, *, timeout: float | None = None) -> tuple[StageLoad, ...]:
        """The present load of every stage and replica."""
        request = service_pb2.GetLoadRequest()
        return decode_load(await self._unary("GetLoad", request, timeout))

    async def watch_load(
        self, *, timeout: float | None = None
    ) -> AsyncGenerator[tuple[StageLoad, ...], None]:
        """The load at once, on change, and at least every second; a slow reader gets the newest.
        Ends when the iteration is left, after `timeout` seconds (DeadlineExceededError), or with
        the server."""
        stub = self._lines.stub()

        async def attempt(left: float | None) -> tuple[Any, Any]:
            request = service_pb2.WatchLoadRequest()
            call = stub.WatchLoad(request, timeout=left, metadata=self._metadata())
            return call, await _heard(call)

        call, message = await attempted(self.retry, timeout, attempt)
        try:
            while message is not grpc.aio.EOF:
                yield decode_load(message)
                message = await _heard(call)
        finally:
            call.cancel()

    # ------------------------------------------------------------ attempts

    def _metadata(self, request_id: str = "") -> tuple[tuple[str, str], ...]:
        return (*mirrored(request_id), *self._authorization)

    async def _submit(
        self, request: AddRequestRequest, timeout: float | None
    ) -> tuple[Accepted, AsyncGenerator[Event, None], str]:
        """A request that was accepted: its first event, all others, and the pod that runs it."""
        stub = self._lines.stub()

        async def attempt(
            left: float | None,
        ) -> tuple[Accepted, AsyncGenerator[Event, None], str]:
            metadata = self._metadata(request.request_id)
            call = stub.AddRequest(request, timeout=left, metadata=metadata)
            events = read_events(call)
            first = await anext(events)
            if not isinstance(first, Accepted):
                raise ProtocolError("the first event is not accepted")
            return first, events, await self._lines.pod_of(call)

        return await attempted(self.retry, timeout, attempt)

    async def _set_up(
        self, setup: service_pb2.InteractionSetup, request_id: str, timeout: float | None
    ) -> tuple[Interaction, str]:
        """A session that stands, and the pod that runs its request."""
        stub = self._lines.stub(request_id)

        async def attempt(left: float | None) -> tuple[Interaction, str]:
            call = stub.SubmitInteraction(timeout=left, metadata=self._metadata(request_id))
            return await begin_session(call, setup), await self._lines.pod_of(call)

        return await attempted(self.retry, timeout, attempt)

    async def _unary(
        self, rpc: str, request: Message, timeout: float | None, request_id: str = ""
    ) -> Any:
        """A call that may be made twice."""
        method = getattr(self._lines.stub(request_id), rpc)

        async def attempt(left: float | None) -> Any:
            try:
                return await method(request, timeout=left, metadata=self._metadata(request_id))
            except grpc.aio.AioRpcError as error:
                raise decode_error(error) from None

        return await attempted(self.retry, timeout, attempt)


async def _heard(call: Any) -> Any:
    """The call's next message, or EOF."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        raise decode_error(error) from None
    except BaseException:
        call.cancel()
        raise


def _outcome(number: int) -> AbortOutcome:
    return decode_enum(AbortOutcome, service_pb2.AbortResponse.Outcome, number, "OUTCOME_")
