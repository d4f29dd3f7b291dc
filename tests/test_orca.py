"""Load for gRPC's balancers: xds-protos, in a process of its own, reads what the server says."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from omni_grpc.load import Utilization
from omni_grpc.orca import METHOD, SERVICE, TRAILER, encode
from omni_grpc.server import Server
from tests.running import BIN, serving, text_pipeline
from tests.support import client, collect, echo, freed, refusal, script, started, stub_of

APART = Path(sys.prefix) / "lib/apart"
"""Where xds-protos is: it puts older copies of other packages' files beside its own."""

READ = """
import base64, json, sys
import google.protobuf
sys.path.append(sys.argv[1])
from google.protobuf.json_format import MessageToDict
from google.protobuf.unknown_fields import UnknownFieldSet
from xds.data.orca.v3 import orca_load_report_pb2
for line in sys.stdin:
    report = orca_load_report_pb2.OrcaLoadReport.FromString(base64.b64decode(line))
    assert not len(UnknownFieldSet(report))
    told = MessageToDict(report, preserving_proto_field_name=True)
    print(json.dumps(told))
"""


async def parsed(*reports: bytes) -> list[dict[str, Any]]:
    """The reports as xds-protos reads them."""
    lines = "\n".join(base64.b64encode(report).decode() for report in reports)
    command = [sys.executable, "-c", READ, str(APART)]
    done = await asyncio.to_thread(
        subprocess.run, command, input=lines, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def trailer(server: Server, method: str, body: str) -> bytes:
    """The trailer of a call, by grpcurl: grpcio's own clients keep it to themselves."""
    address = f"127.0.0.1:{server.port}"
    command = [str(BIN / "grpcurl"), "-plaintext", "-v", "-d", body, address, method]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=20
    )
    found = re.search(rf"^{TRAILER}: (\S*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return base64.b64decode(found[1] + "=" * (-len(found[1]) % 4))


async def reports(channel: grpc.aio.Channel, interval_ms: int) -> Any:
    """A stream of reports, as bytes."""
    interval = duration_pb2.Duration(nanos=interval_ms * 1_000_000).SerializeToString()
    call: Any = channel.unary_stream(f"/{SERVICE}/{METHOD}")
    # Field 1 of OrcaLoadReportRequest.
    return call(bytes([0x0A, len(interval)]) + interval, timeout=20)


OMNI = "omni_grpc.v1.OmniService"


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("GetLoad", "{}"),
        ("AddRequest", '{"prompt": {"text": "hello"}}'),
        ("AddRequest", '{"pipeline": "none-of-these", "prompt": {"text": "hello"}}'),
    ],
    ids=["unary", "stream", "error"],
)
async def test_every_answer_and_error_brings_a_report(
    echo_server: Server, method: str, body: str
) -> None:
    (report,) = await parsed(await trailer(echo_server, f"{OMNI}/{method}", body))
    assert {"requests", "running", "work_left"} <= set(report["named_metrics"])
    assert report["named_metrics"]["queue_depth"] == 0, "nobody waits before a stage"
    assert "kv_cache" not in str(report), "echo's stages do not tell: absent, not 0"


async def test_a_report_tells_what_runs() -> None:
    async with serving(echo({"name": "busy"}), max_requests=4) as server:
        call = await started(
            server.omni, stage_params=[script("text", outputs=1000, interval_ms=10)]
        )
        (report,) = await parsed(await trailer(server.server, f"{OMNI}/GetLoad", "{}"))
        assert report["named_metrics"]["requests"] == 1
        assert report["named_metrics"]["running"] >= 1
        assert report["application_utilization"] == 0.25
        call.cancel()
        await freed(server.server)


async def test_rates_count_calls_and_errors() -> None:
    async with serving(text_pipeline("rated")) as server:
        await collect(server.omni)
        for _ in range(2):
            await refusal(server.omni, pipeline="none-of-these")
        (report,) = await parsed(await trailer(server.server, f"{OMNI}/GetLoad", "{}"))
        assert report["rps_fractional"] == pytest.approx(report["eps"] * 1.5)


async def test_full_caches_are_a_share_and_queues_a_number() -> None:
    load = Utilization(1.5, 7, 5, 2, 120.0, 0.75)
    (report,) = await parsed(encode(load, 3.5, 0.5).SerializeToString())
    assert report == {
        "application_utilization": 1.5,
        "rps_fractional": 3.5,
        "eps": 0.5,
        "utilization": {"kv_cache": 0.75},
        "named_metrics": {
            "requests": 7,
            "running": 5,
            "queue_depth": 2,
            "work_left": 120,
            "kv_cache_use": 0.75,
        },
    }


async def test_reports_come_out_of_band_at_the_interval_that_was_asked(
    echo_server: Server,
) -> None:
    async with client(echo_server) as channel:
        call = await reports(channel, 200)
        first, began = await call.read(), time.monotonic()
        busy = await started(
            stub_of(channel), stage_params=[script("text", outputs=1000, interval_ms=10)]
        )
        later = [await call.read() for _ in range(5)]
        elapsed = time.monotonic() - began
        call.cancel()
        busy.cancel()
    await freed(echo_server)
    told = await parsed(first, later[-1])
    assert [report["named_metrics"]["requests"] for report in told] == [0, 1]
    assert 0.9 < elapsed < 5.0


async def test_out_of_band_reports_end_when_the_server_drains() -> None:
    async with serving(text_pipeline("leaving")) as server:
        call = await reports(server.channel, 200)
        await call.read()
        began = time.monotonic()
        stopping = asyncio.create_task(server.stop(5))
        while await call.read() is not grpc.aio.EOF:
            pass
        assert (await call.code()) is grpc.StatusCode.OK
        await stopping
        assert time.monotonic() - began < 5
