"""OmniService: decode, submit, encode. No logic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from msgspec.structs import replace

from omni_grpc.auth import tenant_of
from omni_grpc.engine import Engine
from omni_grpc.errors import AbortedByClient
from omni_grpc.interaction import Session
from omni_grpc.interceptors import Context, mirrored, set_request_id, trace_headers
from omni_grpc.load import LoadFeed
from omni_grpc.outbox import Numbered
from omni_grpc.rpc import asks, opened
from omni_grpc.run import Run, owned_task
from omni_grpc.types import Request, UpdateChunk
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from omni_grpc.wire.events import EventEncoder
from omni_grpc.wire.info import encode_load, encode_outcomes, encode_server_info
from omni_grpc.wire.interactions import Attach, decode_messages, decode_setup, encode_notice
from omni_grpc.wire.requests import MAX_ID, decode_abort, decode_request
from omni_grpc.wire.updates import decode_chunks, decode_header
from omni_grpc.writer import Writer

HALF_CLOSE_S = 0.2
"""How long a session that has finished waits for its client's half-close."""


class OmniServicer(service_pb2_grpc.OmniServiceServicer):
    """The service over one engine. `pod` names this server to clients and gateways."""

    def __init__(self, engine: Engine, pod: str, load: LoadFeed) -> None:
        self._engine = engine
        self._load = load
        self._pod = pod

    async def AddRequest(self, request: service_pb2.AddRequestRequest, context: Context) -> None:
        """Submits and streams. Leaving early in whatever way aborts the request."""
        if len(request.request_id) <= MAX_ID:
            set_request_id(request.request_id)
        run = await self._submit(request, context)
        set_request_id(run.request_id)
        try:
            await self._greet(run, context)
            await self._stream(run, context)
        finally:
            # Synchronous on purpose: when the client left, an await here may never come back.
            run.close(AbortedByClient("the client left"))

    async def _submit(self, request: service_pb2.AddRequestRequest, context: Context) -> Run:
        headers, left = trace_headers(context), context.time_remaining()
        decoded = _of_tenant(decode_request(request, headers, left), context)
        asks(decoded)
        run = await self._engine.submit(decoded)
        opened(run)
        return run

    async def _stream(self, run: Run, context: Context) -> None:
        encode = EventEncoder().encode
        with Writer(context, self._engine.settings.write_timeout) as writer:
            while (numbered := await run.next()) is not None:
                if isinstance(numbered, Numbered):
                    await writer.write(encode(numbered))

    async def StreamingUpdate(
        self, request: AsyncIterator[service_pb2.StreamingUpdateRequest], context: Context
    ) -> service_pb2.StreamingUpdateResponse:
        """Feeds a resumable request. Breaking off leaves it waiting for another feeder."""
        request_id = await decode_header(request)
        if len(request_id) <= MAX_ID:
            set_request_id(request_id)
        run, feeder = self._engine.attach(request_id, tenant_of(context))
        opened(run)
        with feeder:
            summary = await self._engine.feed(run, feeder, self._chunks(run, request, context))
        return service_pb2.StreamingUpdateResponse(
            accepted_chunks=summary.accepted_chunks,
            duplicate_chunks=summary.duplicate_chunks,
            segments=summary.segments,
        )

    async def _chunks(
        self,
        run: Run,
        request: AsyncIterator[service_pb2.StreamingUpdateRequest],
        context: Context,
    ) -> AsyncIterator[UpdateChunk]:
        async for chunk in decode_chunks(request):
            yield chunk
        # A lost or cancelled call looks like a half-close to who reads from it, and would end the
        # request's input. Only a call that still stands can be written to: this raises if not.
        await self._greet(run, context)

    async def _greet(self, run: Run, context: Context) -> None:
        await context.send_initial_metadata(
            (("omni-request-id", mirrored(run.request_id)), ("omni-pod", self._pod))
        )

    async def SubmitInteraction(
        self, request: AsyncIterator[service_pb2.SubmitInteractionRequest], context: Context
    ) -> None:
        """One session. What it opened ends with it; what it attached to goes on."""
        setup = await decode_setup(request)
        with await self._session(setup, context) as session:
            set_request_id(session.run.request_id)
            await self._greet(session.run, context)
            request_id = session.run.request_id
            work = session.listen(decode_messages(request))
            listening = owned_task(work, request_id, "listening to a session")
            speaking = owned_task(self._speak(session, context), request_id, "speaking to one")
            try:
                await asyncio.wait((listening, speaking), return_when=asyncio.FIRST_COMPLETED)
                if not speaking.done():
                    # Half-closed: outputs go on. Or out of order: that ends the session.
                    listening.result()
                await speaking
                # Proxies may break off a call that ends while its client could still write, and
                # drop what was under way: who half-closes at `finished` loses nothing.
                await asyncio.wait((listening,), timeout=HALF_CLOSE_S)
            finally:
                listening.cancel()
                speaking.cancel()
                await asyncio.gather(listening, speaking, return_exceptions=True)

    async def _session(
        self, setup: service_pb2.AddRequestRequest | Attach, context: Context
    ) -> Session:
        limit = self._engine.settings.queue_bytes
        if isinstance(setup, Attach):
            run = self._engine.orchestrator.find(setup.request_id, tenant_of(context))
            opened(run)
            return Session(
                run, owner=False, receive_outputs=setup.receive_outputs, limit_bytes=limit
            )
        run = await self._submit(setup, context)
        return Session(run, owner=True, receive_outputs=True, limit_bytes=limit)

    async def _speak(self, session: Session, context: Context) -> None:
        encode = EventEncoder().encode
        with Writer(context, self._engine.settings.write_timeout) as writer:
            while (item := await session.next()) is not None:
                if isinstance(item, Numbered):
                    message = service_pb2.SubmitInteractionResponse(response=encode(item))
                else:
                    message = encode_notice(item)
                await writer.write(message)

    async def Abort(
        self, request: service_pb2.AbortRequest, context: Context
    ) -> service_pb2.AbortResponse:
        """Aborts; answers when the stages are free."""
        request_ids = decode_abort(request)
        outcomes = await self._engine.abort(request_ids, tenant_of(context))
        return encode_outcomes(request_ids, outcomes)

    async def GetServerInfo(
        self, request: service_pb2.GetServerInfoRequest, context: Context
    ) -> service_pb2.GetServerInfoResponse:
        """What is served."""
        return encode_server_info(self._engine, self._pod)

    async def GetLoad(
        self, request: service_pb2.GetLoadRequest, context: Context
    ) -> service_pb2.GetLoadResponse:
        """The present load."""
        return service_pb2.GetLoadResponse(stages=encode_load(self._engine.load()))

    async def WatchLoad(self, request: service_pb2.WatchLoadRequest, context: Context) -> None:
        """The load at once, then on change. A slow client gets the newest."""
        with Writer(context, self._engine.settings.write_timeout) as writer:
            async with aclosing(self._load.states()) as states:
                async for stages in states:
                    message = service_pb2.WatchLoadResponse(stages=encode_load(stages))
                    await writer.write(message)


def _of_tenant(request: Request, context: Context) -> Request:
    """The request, as its caller's tenant makes it."""
    if not (tenant := tenant_of(context)):
        return request
    return replace(request, options=replace(request.options, tenant=tenant))
