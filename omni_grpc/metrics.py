"""What a server measures of its calls and requests, for Prometheus. Each server has a registry of
its own. What pools hold is read at scrape instead (gauges.py).

Labels are names from the configuration and from closed lists: never a request's, a tenant's or a
client's own words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache

import prometheus_client
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

# A gauge beside every counter that says when it was made: nobody reads those.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Bounds for what should take no time: hops, gaps, lag."""
LONG_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Bounds for what a model takes."""
FACTORS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)


class Buckets:
    """A histogram that is filled for every request, or every message: adding costs no lock and a
    third of a microsecond, a tenth of what Prometheus's own takes. From one thread."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SHORT_S) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus wants them."""
        counts, found, sums = list(self.counts), 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            found += count
            sums.append((bound, float(found)))
        return sums


class BucketFamily(Collector):
    """Buckets by labels, as one metric of a registry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        bounds: tuple[float, ...] = SHORT_S,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._children: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The buckets of these labels, made where there are none yet."""
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Buckets(self._bounds)
        return found

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """What it is called; nothing is collected to find that out."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The present values. In a scrape's thread."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, buckets in list(self._children.items()):
            family.add_metric(values, buckets.cumulative(), buckets.total)
        yield family


class Metrics:
    """One server's instruments. Cheap to have, whether or not anybody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_calls()
        self._of_requests()
        self._of_outputs()
        self.loop_lag = BucketFamily(
            self.registry,
            "omni_grpc_event_loop_lag_seconds",
            "How late the server's event loop woke, sampled five times a second.",
        )

    def _of_calls(self) -> None:
        self.rpcs = Counter(
            "omni_grpc_rpcs_total",
            "Calls that ended, by the status that was sent.",
            ("method", "code"),
            registry=self.registry,
        )
        self.rpcs_of = cache(self.rpcs.labels)
        """`rpcs.labels`, without its lock for labels that it has had. Nothing is ever removed."""
        self.rpc_seconds = self._histogram(
            "rpc_duration_seconds", "From a call's headers to its status.", "method", "code"
        )
        self.errors = Counter(
            "omni_grpc_rpc_errors_total",
            "Calls that ended with an error of this server, by its reason.",
            ("method", "reason"),
            registry=self.registry,
        )
        self.refused = Counter(
            "omni_grpc_requests_refused_total",
            "Requests that were not accepted, by reason.",
            ("reason",),
            registry=self.registry,
        )

    def _of_requests(self) -> None:
        self.requests = Counter(
            "omni_grpc_requests_total",
            "Accepted requests that ended: finished, cancelled or failed.",
            ("pipeline", "outcome"),
            registry=self.registry,
        )
        self.requests_of = cache(self.requests.labels)
        """As `rpcs_of`."""
        self.queue_wait = self._histogram(
            "queue_wait_seconds",
            "From sending a request to stage 0 until that took it, without its preparation.",
            "pipeline",
        )
        self.stage_seconds = self._histogram(
            "stage_duration_seconds",
            "From a request's first input of a stage to the stage's last output.",
            "pipeline",
            "stage",
        )
        self.hop = self._histogram(
            "hop_seconds",
            "From sending a stage its first input until it began to prepare it.",
            "pipeline",
            "stage",
            bounds=SHORT_S,
        )

    def _of_outputs(self) -> None:
        self.first_output = self._histogram(
            "first_output_seconds",
            "From a request's arrival to its first output.",
            "pipeline",
            "modality",
        )
        self.chunk_gap = self._histogram(
            "chunk_gap_seconds",
            "Between two outputs of one answer.",
            "pipeline",
            "modality",
            bounds=SHORT_S,
        )
        self.realtime_factor = self._histogram(
            "audio_realtime_factor_ratio",
            "From a request's arrival to its last sound, over the length of the sound.",
            "pipeline",
            bounds=FACTORS,
        )
        self.underruns = Counter(
            "omni_grpc_audio_underruns_total",
            "Sounds that came after what came before them had been played.",
            ("pipeline",),
            registry=self.registry,
        )

    def _histogram(
        self, name: str, text: str, *labels: str, bounds: tuple[float, ...] = LONG_S
    ) -> BucketFamily:
        return BucketFamily(self.registry, f"omni_grpc_{name}", text, labels, bounds)
