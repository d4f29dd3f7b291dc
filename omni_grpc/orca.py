"""Load for gRPC's own balancers: ORCA reports, as a trailer of each answer and out of band.

The messages are xds.data.orca.v3 and xds.service.orca.v3, as far as they are filled here. They are
declared in a pool of their own: the package that has them all, xds-protos, puts older copies over
other packages' files (google.rpc, opentelemetry.proto) and needs not be there.

Formats: https://github.com/cncf/xds/tree/main/xds/data/orca/v3,
https://github.com/grpc/proposal/blob/master/A51-custom-backend-metrics.md"""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, duration_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from omni_grpc.interceptors import Context
from omni_grpc.load import LoadFeed, Rate, Utilization
from omni_grpc.observation import Trailers

TRAILER = "endpoint-load-metrics-bin"
SERVICE = "xds.service.orca.v3.OpenRcaService"
METHOD = "StreamCoreMetrics"
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
FRESH_S = 0.02
"""How old a report may be that goes out again, so that a storm of short calls costs little."""

_Field = descriptor_pb2.FieldDescriptorProto


def _messages() -> DescriptorPool:
    """The two messages, field numbers as in their definitions."""
    duration = descriptor_pb2.FileDescriptorProto()
    duration_pb2.DESCRIPTOR.CopyToProto(duration)
    report = descriptor_pb2.FileDescriptorProto(
        name="omni_grpc/orca_load_report.proto", package="xds.data.orca.v3", syntax="proto3"
    )
    message = report.message_type.add(name="OrcaLoadReport")
    for name, number in (("rps_fractional", 6), ("eps", 7), ("application_utilization", 9)):
        message.field.add(
            name=name, number=number, type=_Field.TYPE_DOUBLE, label=_Field.LABEL_OPTIONAL
        )
    for name, number in (("utilization", 5), ("named_metrics", 8)):
        _add_map(message, name, number)
    service = descriptor_pb2.FileDescriptorProto(
        name="omni_grpc/orca.proto",
        package="xds.service.orca.v3",
        syntax="proto3",
        dependency=[duration.name],
    )
    service.message_type.add(name="OrcaLoadReportRequest").field.add(
        name="report_interval",
        number=1,
        type=_Field.TYPE_MESSAGE,
        type_name=".google.protobuf.Duration",
        label=_Field.LABEL_OPTIONAL,
    )
    pool = DescriptorPool()
    for file in (duration, report, service):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_map(message: descriptor_pb2.DescriptorProto, name: str, number: int) -> None:
    """A map<string, double>."""
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    for key, place, kind in (("key", 1, _Field.TYPE_STRING), ("value", 2, _Field.TYPE_DOUBLE)):
        entry.field.add(name=key, number=place, type=kind, label=_Field.LABEL_OPTIONAL)
    message.field.add(
        name=name,
        number=number,
        type=_Field.TYPE_MESSAGE,
        type_name=f".xds.data.orca.v3.{message.name}.{entry.name}",
        label=_Field.LABEL_REPEATED,
    )


_pool = _messages()
OrcaLoadReport: Any = GetMessageClass(
    _pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport")
)
OrcaLoadReportRequest: Any = GetMessageClass(
    _pool.FindMessageTypeByName("xds.service.orca.v3.OrcaLoadReportRequest")
)


def encode(load: Utilization, rps: float, eps: float) -> Any:
    """The load as an OrcaLoadReport. What is not known is not in it."""
    known = {
        "requests": load.requests,
        "running": load.running,
        "queue_depth": load.waiting,
        "work_left": load.work_left,
        "kv_cache_use": load.kv_cache_use,
    }
    report = OrcaLoadReport(
        application_utilization=load.used,
        rps_fractional=rps,
        eps=eps,
        named_metrics={name: float(value) for name, value in known.items() if value is not None},
    )
    if load.kv_cache_use is not None:
        # A share: those must be in [0, 1].
        report.utilization["kv_cache"] = min(1.0, load.kv_cache_use)
    return report


class Reports:
    """One server's reports."""

    def __init__(self, feed: LoadFeed) -> None:
        self._feed = feed
        self._calls, self._errors = Rate(), Rate()
        self._encoded, self._encoded_at = b"", float("-inf")

    def count(self, failed: bool) -> None:
        """A call ended."""
        self._calls.add()
        if failed:
            self._errors.add()

    def report(self) -> Any:
        """The load now, as an OrcaLoadReport."""
        return encode(self._feed.utilization(), self._calls.per_second, self._errors.per_second)

    def trailers(self) -> Trailers:
        """The load, as an answer's trailer."""
        now = time.monotonic()
        if now - self._encoded_at > FRESH_S:
            self._encoded, self._encoded_at = self.report().SerializeToString(), now
        return ((TRAILER, self._encoded),)

    async def stream(self, request: Any, context: Context) -> None:
        """StreamCoreMetrics: a report every `report_interval`, 0.1 s at least, until the client
        leaves or the server drains."""
        interval = DEFAULT_INTERVAL_S
        if request.HasField("report_interval"):
            asked = request.report_interval
            interval = max(MIN_INTERVAL_S, asked.seconds + asked.nanos / 1e9)
        while True:
            await context.write(self.report())
            if await self._feed.rest(interval):
                return


def add_orca(server: grpc.aio.Server, reports: Reports) -> None:
    """Registers the out-of-band service."""
    method = grpc.unary_stream_rpc_method_handler(
        reports.stream,
        request_deserializer=OrcaLoadReportRequest.FromString,
        response_serializer=OrcaLoadReport.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})
    server.add_generic_rpc_handlers((handler,))
