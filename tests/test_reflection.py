"""Tools that know no .proto file find, describe and call the service: reflection v1 and v1alpha."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_database, descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as messages

from omni_grpc.v1 import service_pb2
from tests.conformance.tool_peers import documents
from tests.running import BIN, ServerProcess

SERVICE = "omni_grpc.v1.OmniService"
SERVICES = {
    SERVICE,
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
METHODS = [method.name for method in service_pb2.DESCRIPTOR.services_by_name["OmniService"].methods]
PROMPT = json.dumps({"prompt": {"text": "hello big world"}})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where `echo` is served."""
    with ServerProcess("echo") as server:
        yield f"127.0.0.1:{server.await_serving()}"


def run(*command: str) -> str:
    """What the tool prints; it must succeed."""
    done = subprocess.run(
        [BIN / command[0], *command[1:]], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def grpcurl(address: str, *arguments: str, data: str | None = None) -> str:
    """grpcurl, which asks v1alpha."""
    given = ["-d", data] if data is not None else []
    return run("grpcurl", "-plaintext", *given, address, *arguments)


def buf(address: str, method: str, data: str | None = None, *flags: str) -> str:
    """buf curl, which asks v1 first."""
    given = ["--data", data] if data is not None else []
    common = ("--http2-prior-knowledge", "--protocol", "grpc", "--reflect-protocol", "grpc-v1")
    return run("buf", "curl", *common, *given, *flags, f"http://{address}{method}")


def check_stream(events: list[dict[str, object]]) -> None:
    """The echo of PROMPT, as JSON: accepted, outputs of three stages, finished."""
    assert "accepted" in events[0] and "finished" in events[-1]
    assert [int(str(event.get("seq", "0"))) for event in events] == list(range(len(events)))
    outputs = [event["output"] for event in events[1:-1]]
    assert all(isinstance(output, dict) for output in outputs)
    text = "".join(o["text"]["text"] for o in outputs if "text" in o)  # type: ignore[index,operator]
    assert text == "hello big world"
    images = [o["image"]["data"] for o in outputs if "image" in o]  # type: ignore[index,operator]
    assert base64.b64decode(images[0]).startswith(b"\x89PNG")


# ---------------------------------------------------------------- grpcurl: v1alpha


def test_grpcurl_lists_services_and_methods(address: str) -> None:
    assert set(grpcurl(address, "list").split()) == SERVICES
    listed = grpcurl(address, "list", SERVICE).split()
    assert listed == sorted(f"{SERVICE}.{name}" for name in METHODS)


def test_grpcurl_describes_service_and_message(address: str) -> None:
    described = grpcurl(address, "describe", SERVICE)
    assert (
        "rpc AddRequest ( .omni_grpc.v1.AddRequestRequest ) "
        "returns ( stream .omni_grpc.v1.AddRequestResponse );" in described
    )
    request = grpcurl(address, "describe", "omni_grpc.v1.AddRequestRequest")
    assert "optional int32 priority" in request
    # Types of imported files too.
    assert "sample_rate_hz" in grpcurl(address, "describe", "omni_grpc.v1.AudioFormat")
    everything = grpcurl(address, "describe")
    assert all(f"{service} is a service" in everything for service in SERVICES)
    assert "SERVING = 1" in grpcurl(
        address, "describe", "grpc.health.v1.HealthCheckResponse.ServingStatus"
    )


def test_grpcurl_calls_a_unary_method(address: str) -> None:
    (info,) = documents(grpcurl(address, f"{SERVICE}/GetServerInfo"))
    assert info["default_pipeline"] == "echo"


def test_grpcurl_calls_a_streaming_method(address: str) -> None:
    check_stream(documents(grpcurl(address, f"{SERVICE}/AddRequest", data=PROMPT)))


def test_grpcurl_checks_health(address: str) -> None:
    data = json.dumps({"service": "omni-readiness"})
    (answer,) = documents(grpcurl(address, "grpc.health.v1.Health/Check", data=data))
    assert answer == {"status": "SERVING"}


def test_grpcurl_shows_an_error_with_its_details(address: str) -> None:
    done = subprocess.run(
        [BIN / "grpcurl", "-plaintext", "-d", "{}", address, f"{SERVICE}/AddRequest"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode != 0
    assert "InvalidArgument" in done.stderr
    # The details' types are found by reflection too.
    assert "INVALID_FIELD" in done.stderr and "google.rpc.BadRequest" in done.stderr
    assert "prompt: is required" in done.stderr


# ---------------------------------------------------------------- buf curl: v1


def test_buf_lists_services_and_methods(address: str) -> None:
    assert set(buf(address, "", None, "--list-services").split()) == SERVICES
    listed = set(buf(address, "", None, "--list-methods").split())
    assert {f"{SERVICE}/{name}" for name in METHODS} <= listed
    assert "grpc.health.v1.Health/Check" in listed


def test_buf_calls_a_unary_method(address: str) -> None:
    (info,) = documents(buf(address, f"/{SERVICE}/GetServerInfo", "{}"))
    assert info["defaultPipeline"] == "echo"


def test_buf_calls_a_streaming_method(address: str) -> None:
    check_stream(documents(buf(address, f"/{SERVICE}/AddRequest", PROMPT)))


def test_buf_checks_health(address: str) -> None:
    data = json.dumps({"service": "omni-readiness"})
    (answer,) = documents(buf(address, "/grpc.health.v1.Health/Check", data))
    assert answer == {"status": "SERVING"}


# ---------------------------------------------------------------- a stub of v1


def ask_v1(
    channel: grpc.Channel, *requests: messages.ServerReflectionRequest
) -> list[messages.ServerReflectionResponse]:
    """The answers of grpc.reflection.v1; its messages are those of v1alpha."""
    call = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=messages.ServerReflectionRequest.SerializeToString,
        response_deserializer=messages.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), timeout=10))


def test_client_of_v1_builds_a_call_from_descriptors(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        listed, found, unknown = ask_v1(
            channel,
            messages.ServerReflectionRequest(list_services=""),
            messages.ServerReflectionRequest(file_containing_symbol=SERVICE),
            messages.ServerReflectionRequest(file_containing_symbol="omni_grpc.v1.Nobody"),
        )
        assert {service.name for service in listed.list_services_response.service} == SERVICES
        assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        files = descriptor_database.DescriptorDatabase()
        for data in found.file_descriptor_response.file_descriptor_proto:
            files.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        service = descriptor_pool.DescriptorPool(files).FindServiceByName(SERVICE)
        assert [method.name for method in service.methods] == METHODS
        method = service.methods_by_name["GetServerInfo"]
        answer = message_factory.GetMessageClass(method.output_type)
        call: Any = channel.unary_unary(
            f"/{SERVICE}/GetServerInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        info = call(message_factory.GetMessageClass(method.input_type)(), timeout=10)
    assert info.default_pipeline == "echo"
