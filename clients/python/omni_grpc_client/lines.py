"""The channels of a client: one to its target, and one to each pod that it was told to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from omni_grpc.v1 import service_pb2_grpc

Pods = Callable[[str], str]
"""Where a pod is reached, "HOST:PORT", by the name that it says as omni-pod."""


class Lines:
    """Opens channels and closes them. `check` raises where a target must not be called."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
        pods: Pods | None,
        check: Callable[[str], object],
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._options = options
        self._pods = pods
        self._check = check
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._where: dict[str, str] = {}
        """The pods of requests that run, by id."""
        self._open = False

    def open(self) -> None:
        """From now on there are stubs; their channels belong to the running event loop."""
        self._open = True

    async def close(self) -> None:
        """Closes all channels. Idempotent."""
        for channel in self._channels.values():
            await channel.close()

    def stub(self, request_id: str = "") -> Any:
        """A stub of the target; of the pod that runs the request, where one is known."""
        if not self._open:
            raise RuntimeError("enter the client first: async with OmniClient(...) as client")
        pod = self._where.get(request_id)
        target = self._pods(pod) if self._pods is not None and pod else self._target
        if target not in self._channels:
            self._check(target)
            self._channels[target] = self._channel(target)
        return service_pb2_grpc.OmniServiceStub(self._channels[target])

    async def pod_of(self, call: Any) -> str:
        """The pod that answers a call; "" where nobody follows pods."""
        if self._pods is None:
            return ""
        return str(dict(await call.initial_metadata() or ()).get("omni-pod", ""))

    @contextmanager
    def running(self, request_id: str, pod: str) -> Iterator[None]:
        """Within it, calls about the request go to that pod."""
        if not pod:
            yield
            return
        self._where[request_id] = pod
        try:
            yield
        finally:
            self._where.pop(request_id, None)

    def _channel(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=self._options)
        return grpc.aio.secure_channel(target, self._credentials, options=self._options)
