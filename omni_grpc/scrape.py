"""The Prometheus endpoint: what is measured, and what pools and requests hold at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_grpc import __version__
from omni_grpc.engine import Engine, StageStatistics
from omni_grpc.errors import StartError
from omni_grpc.metrics import Metrics
from omni_grpc.pool import SlotStatistics

TICK_S = 0.2
"""How often the event loop's lag is looked at."""
REPLICA = ("pipeline", "stage", "replica")


class HeldCollector(Collector):
    """What a server holds, read when it is scraped, in the scrape's thread: it costs nothing
    otherwise, and tells even while the event loop stands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """The metrics' names, with no values."""
        yield from (*self._of_replicas([]), *self._of_server())

    def collect(self) -> Iterator[Metric]:
        """The present values."""
        yield from (*self._of_replicas(self._engine.load()), *self._of_server())

    def _of_server(self) -> Iterator[Metric]:
        engine = self._engine
        runs = engine.orchestrator.runs
        yield _gauge("build_info", "1, with the server's version.", ("version",), __version__)
        yield GaugeMetricFamily(
            "omni_grpc_draining", "Whether new requests are refused.", value=engine.draining
        )
        live = GaugeMetricFamily(
            "omni_grpc_requests_live", "Requests that run or wait.", labels=["pipeline"]
        )
        for pipeline in engine.pipelines:
            live.add_metric([pipeline], sum(r.plan.pipeline.name == pipeline for r in runs))
        yield live
        yield GaugeMetricFamily(
            "omni_grpc_sessions_live",
            "Sessions that opened a request or attached to one.",
            value=sum(r.delivery.owned_by_session + len(r.delivery.taps) for r in runs),
        )
        yield GaugeMetricFamily(
            "omni_grpc_outbox_bytes",
            "Outputs that wait for their clients.",
            value=sum(run.delivery.bytes for run in runs),
        )

    def _of_replicas(self, stages: list[StageStatistics]) -> list[Metric]:
        metrics = _replica_metrics()
        counted = metrics["counted"]
        queued = GaugeMetricFamily(
            "omni_grpc_stage_waiting",
            "Requests that wait for a stage: before it, and in its engines as far as these tell.",
            labels=["pipeline", "stage"],
        )
        for stage in stages:
            # A shared stage is told once, under the first pipeline that uses it.
            inside = sum(slot.load.own.waiting or 0 for slot in stage.replicas)
            queued.add_metric([stage.pipelines[0], stage.stage], stage.waiting + inside)
            for slot in stage.replicas:
                labels = [stage.pipelines[0], stage.stage, str(slot.replica)]
                for name, value in _replica_values(slot).items():
                    if value is not None:
                        metrics[name].add_metric(labels, value)
                for counter, count in slot.load.own.counters.items():
                    counted.add_metric([*labels, counter], count)
        return [*metrics.values(), queued]


def _replica_values(slot: SlotStatistics) -> dict[str, float | None]:
    """By short name; None is not known, and not told."""
    load = slot.load
    return {
        "ready": load.ready,
        "restarts": slot.restarts,
        "running": load.running if load.ready else None,
        "waiting": load.own.waiting,
        "work": load.work if load.ready else None,
        "kv": load.own.kv_cache_use,
        "capacity": slot.capacity,
        "busy": load.busy_s,
        "age": load.sample_age_s,
    }


def _replica_metrics() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"omni_grpc_replica_{name}", text, labels=REPLICA)

    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"omni_grpc_replica_{name}", text, labels=(*REPLICA, *labels))

    return {
        "ready": gauge("ready", "Whether the replica serves."),
        "restarts": counter("restarts", "How often it was started again."),
        "running": gauge("running", "Tasks that it holds, those that wait in it included."),
        "waiting": gauge("waiting", "Of these, tasks that wait in its engine."),
        "work": gauge("work_left", "Work left in it, in tokens, steps or clauses."),
        "kv": gauge("kv_cache_use_ratio", "Part of its KV cache that is used."),
        "capacity": gauge("capacity", "Tasks that it works on at once at most."),
        "busy": counter("busy_seconds", "How long it has held tasks."),
        "age": gauge("sample_age_seconds", "Age of what it told last."),
        "counted": counter("events", "What its engine counts, by names of its own.", "event"),
    }


def _gauge(name: str, text: str, labels: tuple[str, ...], *values: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"omni_grpc_{name}", text, labels=labels)
    family.add_metric(values, 1)
    return family


class Scrape:
    """The endpoint of one server, and the ticker that watches its event loop. `start` it on the
    loop, `stop` it once."""

    def __init__(self, engine: Engine) -> None:
        self.port = 0
        self._metrics: Metrics = engine.metrics
        self._engine = engine
        self._serving: tuple[WSGIServer, Thread] | None = None
        self._ticker: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> None:
        """Listens. Raises StartError if the address is taken."""
        registry = self._metrics.registry
        registry.register(HeldCollector(self._engine))
        ProcessCollector(registry=registry)
        try:
            self._serving = start_http_server(port, host, registry)
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port} for metrics: {error}") from None
        self.port = self._serving[0].server_port
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        loop, lag = asyncio.get_running_loop(), self._metrics.loop_lag.labels()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            lag.add(max(0.0, loop.time() - due))

    async def stop(self) -> None:
        """Ends both."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._serving is not None:
            server, thread = self._serving
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()
