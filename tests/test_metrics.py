"""What a scrape of the Prometheus endpoint tells, and that the documentation, the dashboard and the
alerts speak of nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import timeit
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from omni_grpc.config import ServerConfig
from omni_grpc.errors import StartError
from omni_grpc.metrics import Buckets, Metrics
from omni_grpc.pace import Pace
from omni_grpc.server import Server
from omni_grpc.types import Audio, AudioFormat, Modality, TextDelta
from tests.running import Running, replicas, serving, text_pipeline
from tests.sessions import attached, id_of, talk
from tests.support import ROOT, collect, echo, eventually, freed, refusal, script, started

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


async def scrape(server: Server) -> Samples:
    """Each sample's value, by its name and its sorted labels."""

    def read() -> str:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    samples: Samples = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    wanted = labels.items()
    return sum(v for have, v in samples.get(name, {}).items() if wanted <= dict(have).items())


@pytest.fixture(scope="module")
async def watched() -> AsyncIterator[Running]:
    """A server of `echo` with metrics on a free port."""
    async with serving(echo(), metrics_port=0, max_requests=2) as running:
        yield running


# ---------------------------------------------------------------- what is counted


async def test_a_request_is_in_the_next_scrape(watched: Running) -> None:
    before = await scrape(watched.server)
    await collect(watched.omni)
    after = await scrape(watched.server)

    def gained(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert gained("omni_grpc_rpcs_total", method="AddRequest", code="OK") == 1
    assert gained("omni_grpc_rpc_duration_seconds_count", method="AddRequest", code="OK") == 1
    assert gained("omni_grpc_requests_total", pipeline="echo", outcome="finished") == 1
    assert gained("omni_grpc_queue_wait_seconds_count", pipeline="echo") == 1
    for stage in ("text", "audio", "image"):
        assert gained("omni_grpc_stage_duration_seconds_count", stage=stage) == 1
        assert gained("omni_grpc_hop_seconds_count", stage=stage) == 1
        assert gained("omni_grpc_first_output_seconds_count", modality=stage) == 1
        assert gained("omni_grpc_replica_busy_seconds_total", stage=stage, replica="0") > 0
    # Three words, three tones, one picture; and the answers' ends, which are none.
    assert gained("omni_grpc_chunk_gap_seconds_count", modality="text") in (2, 3)
    assert gained("omni_grpc_chunk_gap_seconds_count", modality="audio") >= 2
    assert gained("omni_grpc_chunk_gap_seconds_count", modality="image") == 0
    assert gained("omni_grpc_audio_realtime_factor_ratio_count", pipeline="echo") == 1
    assert gained("omni_grpc_audio_underruns_total") == 0


async def test_what_is_held_now_is_told(watched: Running) -> None:
    slow = [script("audio", outputs=1000, interval_ms=20)]
    call = await started(watched.omni, stage_params=slow, output_modalities=["MODALITY_AUDIO"])
    samples = await scrape(watched.server)
    assert value(samples, "omni_grpc_replica_running", stage="audio") == 1
    assert value(samples, "omni_grpc_replica_work_left", stage="audio") > 0
    assert value(samples, "omni_grpc_requests_live", pipeline="echo") == 1
    assert value(samples, "omni_grpc_replica_ready") == 3
    assert value(samples, "omni_grpc_draining") == 0
    call.cancel()
    await freed(watched.server)
    samples = await scrape(watched.server)
    assert value(samples, "omni_grpc_replica_running") == 0
    assert value(samples, "omni_grpc_requests_live") == 0
    assert value(samples, "omni_grpc_requests_total", outcome="cancelled") == 1
    assert value(samples, "omni_grpc_rpcs_total", code="CANCELLED") == 1


async def test_what_is_not_known_is_not_told(watched: Running) -> None:
    samples = await scrape(watched.server)
    assert "omni_grpc_replica_waiting" not in samples
    assert "omni_grpc_replica_kv_cache_use_ratio" not in samples
    assert value(samples, "omni_grpc_stage_waiting") == 0


async def test_refusals_are_counted_by_reason(watched: Running) -> None:
    before = await scrape(watched.server)
    await refusal(watched.omni, pipeline="none-of-these")
    await refusal(watched.omni, text="")
    calls = [
        await started(watched.omni, stage_params=[script("text", outputs=1000, interval_ms=20)])
        for _ in range(2)
    ]
    await refusal(watched.omni)
    after = await scrape(watched.server)
    for reason in ("PIPELINE_NOT_FOUND", "INVALID_FIELD", "QUEUE_FULL"):
        for name in ("omni_grpc_requests_refused_total", "omni_grpc_rpc_errors_total"):
            gained = value(after, name, reason=reason) - value(before, name, reason=reason)
            assert gained == 1, (name, reason)
    for call in calls:
        call.cancel()


async def test_a_stage_that_fails_is_a_failure_and_no_refusal(watched: Running) -> None:
    before = await scrape(watched.server)
    failed = await refusal(watched.omni, stage_params=[script("text", outputs=3, fail_at=1)])
    after = await scrape(watched.server)
    assert failed.reason == "STAGE_ERROR"
    assert value(after, "omni_grpc_requests_total", outcome="failed") == 1 + value(
        before, "omni_grpc_requests_total", outcome="failed"
    )
    assert value(after, "omni_grpc_requests_refused_total", reason="STAGE_ERROR") == 0


async def test_sound_that_comes_too_late_is_an_underrun(watched: Running) -> None:
    before = await scrape(watched.server)
    # Tones of a tenth of a second, 300 ms apart.
    late = [script("audio", outputs=3, interval_ms=300)]
    await collect(watched.omni, stage_params=late)
    after = await scrape(watched.server)
    name = "omni_grpc_audio_underruns_total"
    assert value(after, name) - value(before, name) == 2


async def test_a_restart_is_counted_and_unreadiness_seen() -> None:
    config = text_pipeline("dying", restart={"backoff": 0.05})
    async with serving(config, metrics_port=0) as running:
        (replica,) = replicas("dying", "text")
        replica.kill()
        await eventually(lambda: not running.server.engine.pools[0].ready_replicas, within=5)
        samples = await scrape(running.server)
        assert value(samples, "omni_grpc_replica_ready") == 0
        assert "omni_grpc_replica_running" not in samples
        await eventually(lambda: running.server.engine.pools[0].ready_replicas, within=10)
        samples = await scrape(running.server)
        assert value(samples, "omni_grpc_replica_restarts_total", stage="text") == 1


async def test_live_sessions_are_counted(watched: Running) -> None:
    fields = {"stage_params": [script("text", outputs=1000, interval_ms=20)]}
    async with talk(watched.omni, **fields) as owner, attached(watched.omni, id_of(owner)):
        assert value(await scrape(watched.server), "omni_grpc_sessions_live") == 2
    await eventually(lambda: not len(watched.server.engine.orchestrator), within=5)
    assert value(await scrape(watched.server), "omni_grpc_sessions_live") == 0


async def test_the_loops_lag_is_seen(watched: Running) -> None:
    def late(samples: Samples) -> float:
        # Those that came more than half a second late.
        name = "omni_grpc_event_loop_lag_seconds_bucket"
        return value(samples, name, le="+Inf") - value(samples, name, le="0.5")

    before = await scrape(watched.server)
    time.sleep(1.0)  # noqa: ASYNC251 - the loop stands, that is the point
    await asyncio.sleep(0.3)
    assert late(await scrape(watched.server)) > late(before)


# ---------------------------------------------------------------- the endpoint


async def test_without_a_port_nothing_listens() -> None:
    async with serving(text_pipeline("quiet"), warm=False) as running:
        assert running.server.metrics_port == 0


async def test_a_taken_port_fails_the_start_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = Server(ServerConfig(port=0, metrics_port=port), [text_pipeline("late")])
        try:
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
                await server.start()
        finally:
            await server.stop(0)


async def test_it_ends_with_the_server() -> None:
    async with serving(text_pipeline("brief"), metrics_port=0) as running:
        await scrape(running.server)
        await running.stop(0)
        with pytest.raises(urllib.error.URLError):
            await scrape(running.server)


async def test_servers_of_one_process_count_apart(watched: Running) -> None:
    await collect(watched.omni)
    async with serving(text_pipeline("other"), metrics_port=0) as other:
        samples = await scrape(other.server)
        assert value(samples, "omni_grpc_rpcs_total") == 0
        assert {dict(labels)["pipeline"] for labels in samples["omni_grpc_replica_ready"]} == {
            "other"
        }


# ---------------------------------------------------------------- its cost


def test_an_output_costs_less_than_a_microsecond() -> None:
    pace = Pace(Metrics(), "p")
    delta, sound = TextDelta("word"), Audio(bytes(480), AudioFormat(sample_rate_hz=24000))
    for stage, modality, payload in (("a", Modality.TEXT, delta), ("b", Modality.AUDIO, sound)):
        number = 20_000

        def outputs(stage: str = stage, modality: Modality = modality, made: Any = payload) -> None:
            pace.output(stage, modality, made)

        best = (
            min(timeit.repeat(outputs, timer=time.process_time, number=number, repeat=5)) / number
        )
        assert best < 5 * 1e-6, f"{best * 1e6:.2f} us for {modality}"


def test_buckets_are_those_of_prometheus() -> None:
    buckets = Buckets((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 3.0):
        buckets.add(seconds)
    assert buckets.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert buckets.total == 6.0


# ---------------------------------------------------------------- who speaks of it

DASHBOARD = ROOT / "k8s/components/dashboards/omni-grpc.json"
ALERTS = ROOT / "k8s/components/alerts/rules.yaml"
NAME = re.compile(r"\b(?:omni_grpc|process)_[a-z_]+")
SELECTOR = re.compile(r"\b((?:omni_grpc|process)_[a-z_]+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
SCRAPED = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus itself gives to what it scrapes."""


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text())["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def autoscaler_expressions() -> Iterator[str]:
    scaled = yaml.safe_load((ROOT / "k8s/components/keda/scaledobject.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield trigger["metadata"]["query"]


async def exported(server: Server, stub: Any) -> Mapping[str, set[str]]:
    """Labels by metric, of every sample that there can be: those that were scraped, and those that
    need another engine or another end to show, as they are declared."""
    await collect(stub, stage_params=[script("audio", outputs=2, interval_ms=200)])
    await refusal(stub, pipeline="none-of-these")
    samples = await scrape(server)
    known = {name: {k for labels in have for k, _ in labels} for name, have in samples.items()}
    for metric in server.engine.metrics.registry.collect():
        # Those of another engine: how they would be labelled.
        suffix = "_total" if metric.type == "counter" else ""
        known.setdefault(metric.name + suffix, set(getattr(metric, "_labelnames", ())))
    return known


@pytest.mark.parametrize(
    ("expressions", "least"),
    [(dashboard_expressions, 30), (alert_expressions, 9), (autoscaler_expressions, 1)],
)
async def test_expressions_use_what_is_exported(
    watched: Running, expressions: Any, least: int
) -> None:
    known = await exported(watched.server, watched.omni)
    found = 0
    for expression in expressions():
        names = NAME.findall(expression)
        found += len(names)
        assert names, f"no metric of ours in {expression}"
        assert set(names) <= set(known), f"{set(names) - set(known)} in {expression}"
        for name, selector in SELECTOR.findall(expression):
            labels = {part.partition("=")[0].rstrip("!").strip() for part in _parts(selector)}
            assert labels <= known[name] | SCRAPED, (labels, name, expression)
        for grouping in GROUPING.findall(expression):
            labels = {label.strip() for label in grouping.split(",")}
            allowed = set().union(*(known[name] for name in names)) | SCRAPED
            assert labels <= allowed, (labels, expression)
    assert found >= least


def _parts(selector: str) -> list[str]:
    return [
        part for part in re.split(r",(?=[^\"]*(?:\"[^\"]*\"[^\"]*)*$)", selector) if part.strip()
    ]


async def test_the_documentation_has_every_metric_and_its_labels(watched: Running) -> None:
    known = await exported(watched.server, watched.omni)
    row = re.compile(r"^\| `(omni_grpc_[a-z_]+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
    text = (ROOT / "docs/observability.md").read_text()
    told = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in row.findall(text)
    }
    declared = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in watched.server.engine.metrics.registry.collect()
        if metric.name.startswith("omni_grpc_")
    }
    assert {name: kind for name, (kind, _) in told.items()} == declared
    for name, (kind, labels) in told.items():
        sample = name + "_count" if kind == "histogram" else name
        assert labels == known[sample], name
