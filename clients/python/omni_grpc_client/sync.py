"""The client for programs without an event loop. See OmniClient: what a method does, takes and
raises is written there, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from omni_grpc_client.bridge import Bridge, Facade, entering, iterating, waiting
from omni_grpc_client.client import DEFAULT_RETRY, OmniClient
from omni_grpc_client.conversation import Conversation
from omni_grpc_client.events import Accepted, Event
from omni_grpc_client.feed import Feeder, StreamedRequest
from omni_grpc_client.interaction import Interaction, SessionItem
from omni_grpc_client.lines import Pods
from omni_grpc_client.retry import RetryPolicy


class SyncFeeder(Facade[Feeder]):
    """See Feeder."""

    send = waiting(Feeder.send)
    end_segment = waiting(Feeder.end_segment)
    finish = waiting(Feeder.finish)

    @property
    def request_id(self) -> str:
        """Id of the request that is fed."""
        return self._inner.request_id

    @property
    def next_seq(self) -> int:
        """Number of the next chunk."""
        return self._inner.next_seq


class SyncStreamedRequest(Facade[StreamedRequest]):
    """See StreamedRequest. Iterate it in one thread and feed it from another: each waits for its
    own part of the call."""

    def __init__(self, bridge: Bridge, inner: StreamedRequest) -> None:
        super().__init__(bridge, inner)
        self.feeder = SyncFeeder(bridge, inner.feeder)
        self.send = self.feeder.send
        self.end_segment = self.feeder.end_segment
        self.finish = self.feeder.finish

    @property
    def accepted(self) -> Accepted:
        """The first event."""
        return self._inner.accepted

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._inner.request_id

    def __iter__(self) -> Iterator[Event]:
        return self._bridge.each(self._inner)


class SyncInteraction(Facade[Interaction]):
    """See Interaction. Iterate it in one thread, steer and feed it from any."""

    event = waiting(Interaction.event)
    send = waiting(Interaction.send)
    end_segment = waiting(Interaction.end_segment)
    end_input = waiting(Interaction.end_input)
    interrupt = waiting(Interaction.interrupt)
    abort = waiting(Interaction.abort)

    @property
    def request_id(self) -> str:
        """Id of the session's request."""
        return self._inner.request_id

    @property
    def epoch(self) -> int:
        """One more after each interrupt."""
        return self._inner.epoch

    def __iter__(self) -> Iterator[SessionItem]:
        return self._bridge.each(self._inner)


class SyncConversation(Facade[Conversation]):
    """See Conversation. `interrupt` is for another thread than the one that asks."""

    ask = waiting(Conversation.ask)
    stream = iterating(Conversation.stream)
    interrupt = waiting(Conversation.interrupt)

    @property
    def request_id(self) -> str:
        """Id of the conversation's request."""
        return self._inner.request_id


class OmniSyncClient(Facade[OmniClient]):
    """OmniClient for programs without an event loop, `with OmniSyncClient() as client`.

    Its methods are OmniClient's, with plain iterators and context managers in place of async ones;
    leaving an iteration aborts the request as there. Any number of threads may use one client.
    Ctrl-C in a call ends that call, on the server too. The loop that does the work runs in a
    thread of its own, from entering to closing."""

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
        # First: what is wrong with the arguments is said before a thread runs.
        client = OmniClient(
            target,
            credentials=credentials,
            token=token,
            insecure_token=insecure_token,
            retry=retry,
            pods=pods,
            options=options,
        )
        super().__init__(Bridge(), client)

    @property
    def target(self) -> str:
        """Where the server listens."""
        return self._inner.target

    def __enter__(self) -> Self:
        self._bridge.run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel: calls that still run, in other threads, are cancelled, on the server
        too. Idempotent."""
        self._bridge.end(self._inner.close())
        self._bridge.close()

    generate = waiting(OmniClient.generate)
    stream = iterating(OmniClient.stream)
    speak = iterating(OmniClient.speak)
    draw = waiting(OmniClient.draw)
    live = entering(OmniClient.live, SyncInteraction)
    converse = entering(OmniClient.converse, SyncConversation)
    open = entering(OmniClient.open, SyncStreamedRequest)
    feed = entering(OmniClient.feed, SyncFeeder)
    interact = entering(OmniClient.interact, SyncInteraction)
    attach = entering(OmniClient.attach, SyncInteraction)
    abort = waiting(OmniClient.abort)
    server_info = waiting(OmniClient.server_info)
    load = waiting(OmniClient.load)
    watch_load = iterating(OmniClient.watch_load)
