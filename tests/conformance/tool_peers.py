"""grpcurl and `buf curl`: whole calls of one message, without metadata."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from tests.conformance.check import Json, Outcome
from tests.conformance.grpcio_peer import METHODS, UNARY_REQUESTS
from tests.conformance.run import Call
from tests.running import BIN

CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def reachable(case: Json) -> bool:
    """Whether a tool that makes whole calls of one message can run the case."""
    return all(
        step.get("rpc") in UNARY_REQUESTS and not {"start", "metadata", "deadline_ms"} & set(step)
        for step in case.get("steps", [case])
    )


@dataclass(frozen=True)
class Tool:
    """`command`: arguments for an address and a method, with the request on standard input.
    `status`: the status of an error that it has printed."""

    command: Callable[[str, str], Sequence[str]]
    status: Callable[[Json], Status]


class ToolCall:
    """A call that is made when it is closed."""

    def __init__(self, tool: Tool, address: str, rpc: str) -> None:
        path, _, self._response = METHODS[rpc]
        self._tool, self._command = tool, tool.command(address, path[1:])
        self._request: Json = {}
        self._messages: list[Json] = []
        self._outcome = Outcome()

    def send(self, message: Json) -> None:
        """Sets the message."""
        self._request = message

    def close(self) -> None:
        """Makes the call."""
        program, *arguments = self._command
        done = subprocess.run(
            [BIN / program, *arguments],
            input=json.dumps(self._request),
            capture_output=True,
            text=True,
            timeout=20,
        )
        self._messages = [self._message(document) for document in documents(done.stdout)]
        if done.returncode:
            fill(self._outcome, self._tool.status(json.loads(done.stderr)))

    def _message(self, document: Json) -> Json:
        # The tools differ in how they write names and defaults.
        return MessageToDict(ParseDict(document, self._response()))

    def cancel(self) -> None:
        """There is nothing to cancel."""

    def read(self) -> Json | None:
        """The next message."""
        return self._messages.pop(0) if self._messages else None

    def outcome(self) -> Outcome:
        """How it ended."""
        return self._outcome


class ToolPeer:
    """A tool that calls a server."""

    def __init__(self, address: str, tool: Tool) -> None:
        self._address, self._tool = address, tool

    def start(self, rpc: str, metadata: Mapping[str, str], deadline_s: float) -> Call:
        """Prepares a call."""
        return ToolCall(self._tool, self._address, rpc)

    def close(self) -> None:
        """There is nothing to close."""


def grpcurl_command(address: str, method: str) -> Sequence[str]:
    """grpcurl asks reflection v1alpha."""
    return ("grpcurl", "-plaintext", "-format-error", "-d", "@", address, method)


def buf_command(address: str, method: str) -> Sequence[str]:
    """`buf curl` asks reflection v1."""
    plain = ("--http2-prior-knowledge", "--protocol", "grpc")
    return ("buf", "curl", *plain, "--data", "@-", f"http://{address}/{method}")


def buf_status(printed: Json) -> Status:
    """The status in the Connect protocol's form."""
    name = printed["code"].upper().replace("CANCELED", "CANCELLED")
    status = Status(code=grpc.StatusCode[name].value[0], message=printed.get("message", ""))
    for detail in printed.get("details", []):
        value = base64.b64decode(detail["value"] + "==")
        status.details.append(Any(type_url=f"type.googleapis.com/{detail['type']}", value=value))
    return status


GRPCURL = Tool(grpcurl_command, lambda printed: ParseDict(printed, Status()))
BUF = Tool(buf_command, buf_status)


def documents(text: str) -> list[Json]:
    """The JSON documents that stand one after another in a text."""
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


def fill(outcome: Outcome, status: Status) -> None:
    """Sets what a status and its details say."""
    outcome.code, outcome.message = CODES[status.code], status.message
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            outcome.reason, outcome.domain = info.reason, info.domain
        elif detail.Unpack(request):
            outcome.fields = [violation.field for violation in request.field_violations]
        elif detail.Unpack(retry):
            outcome.retry_ms = round(retry.retry_delay.ToTimedelta().total_seconds() * 1e3)
