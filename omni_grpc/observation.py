"""What becomes of every call at its end: metrics, one log line, and the load in its trailers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from omni_grpc.metrics import Metrics
from omni_grpc.rpc import Rpc

log = logging.getLogger("omni_grpc.rpc")

OPENING = ("AddRequest", "SubmitInteraction")
"""What opens a request, or attaches to one."""

Trailers = tuple[tuple[str, str | bytes], ...]


class Observation:
    """Of the calls of one listener. `count` hears of every end, with whether it was an error;
    `trailers` go with every status."""

    def __init__(
        self,
        metrics: Metrics,
        count: Callable[[bool], None] = lambda failed: None,
        trailers: Callable[[], Trailers] = lambda: (),
    ) -> None:
        self.trailers = trailers
        self._metrics = metrics
        self._count = count

    def ended(self, rpc: Rpc) -> None:
        """A call ended."""
        metrics, seconds = self._metrics, rpc.seconds
        metrics.rpcs_of(rpc.method, rpc.code).inc()
        metrics.rpc_seconds.labels(rpc.method, rpc.code).add(seconds)
        if rpc.reason:
            metrics.errors.labels(rpc.method, rpc.reason).inc()
            if rpc.run is None and rpc.method in OPENING:
                metrics.refused.labels(rpc.reason).inc()
        self._count(bool(rpc.reason))
        line = (rpc.method, rpc.code, seconds * 1e3, rpc.request_id or "-")
        log.info("%s %s %.1f ms %s", *line, extra={"fields": rpc.fields()})
