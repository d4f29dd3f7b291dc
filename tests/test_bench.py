"""The benchmark runs, and writes its figures under the names that others read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import names, report
from bench.curves import chain
from bench.foreign import RUST, SERVICER
from bench.load import TICK_S, Taken
from bench.plot import Curve, draw
from omni_grpc.config import PipelineConfig
from tests.support import ROOT

PUBLISHED = [
    "tokens_vs_grpc_128",
    "tokens_vs_http_128",
    "tokens_vs_asyncllm_128",
    "tokens_vs_rust_128",
    "ttft_vs_rust_128",
    "ttft_vs_grpc_128",
    "single_vs_grpc",
    "cpu_vs_bare_256",
    "cpu_us_per_token_merged_256",
    "hop_ms_p50",
    "hop_ms_p99",
    "idle_cpu_percent",
    "cancel_ms_p99",
    "voice_throughput_vs_direct",
    "voice_ttfa_vs_direct",
]
"""Names that do not change: results of different days are compared by them."""


def test_figures_have_the_names_that_were_published() -> None:
    assert list(names.BARS) == PUBLISHED


def test_a_bar_is_met_on_its_own_side() -> None:
    assert names.BARS["tokens_vs_rust_128"].met(1.0)
    assert not names.BARS["tokens_vs_rust_128"].met(0.99)
    assert names.BARS["hop_ms_p50"].met(0.5)
    assert not names.BARS["hop_ms_p50"].met(0.51)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_quick_run_writes_every_figure_of_its_part(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--quick", "--only", "fakes"]
    command += ["--cache", str(tmp_path / "cache"), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert set(names.FAKES) <= set(figures)
    assert all(isinstance(figures[name], float) for name in names.FAKES)
    assert figures["cpu_vs_bare_256"] > 0.1 and figures["hop_ms_p50"] > 0
    assert figures["version_grpcio"] and figures["cores"] >= 1
    assert all(name in done.stdout for name in names.FAKES)


def test_the_object_is_flat_and_begins_with_what_has_a_bar(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    report.write(file, {"other": 1.23456789, "hop_ms_p50": 0.25}, {"machine": "this one"})
    assert file.read_text().index("hop_ms_p50") < file.read_text().index("other")
    assert json.loads(file.read_text()) == {
        "hop_ms_p50": 0.25,
        "other": 1.2346,
        "machine": "this one",
    }


def test_messages_are_counted_between_two_times() -> None:
    rate = {int(n): (n, 2 * n) for n in range(10, 20)}
    taken = Taken(0, 2, [], [], 0, 0, 0, [], rate)
    assert taken.between(11.5 * TICK_S, 13.5 * TICK_S) == (12 + 13, 24 + 26)


def test_what_is_zero_still_travels_to_another_front() -> None:
    """Temperature 0 left out would be the front's own default."""
    greedy = RUST["GenerateRequest"](temperature=0.0).SerializeToString()
    assert greedy == b"\x2d\0\0\0\0"
    params = SERVICER["SamplingParams"](temperature=0.0).SerializeToString()
    assert params == b"\x0d\0\0\0\0"


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_chain_of_stages_is_a_pipeline_that_gives_text(length: int) -> None:
    config = PipelineConfig.model_validate({"name": "chain", "stages": chain(length)})
    assert len(config.stages) == length
    assert [stage.output is not None for stage in config.stages] == [False] * (length - 1) + [True]


def test_a_drawing_shows_every_point(tmp_path: Path) -> None:
    file = tmp_path / "curves.svg"
    draw([Curve("streams", "µs", [(1, 10.0), (4, 12.5), (16, 11.0)])], file)
    drawn = file.read_text()
    assert drawn.count("<circle") == 3
    assert "12.5" in drawn and drawn.startswith("<svg")
