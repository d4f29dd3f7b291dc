"""A call to a server from the command line, and what its errors become."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from omni_grpc.cli.connection import TOKEN_VARIABLE, Connection
from omni_grpc.cli.failure import ExitCode, fail

if TYPE_CHECKING:
    # Imported where a call is made: the other commands do without gRPC and its 0.1 s.
    from omni_grpc_client import OmniCallError, OmniClient

T = TypeVar("T")

CODES = {
    "INVALID_ARGUMENT": ExitCode.INVALID,
    "FAILED_PRECONDITION": ExitCode.INVALID,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.DEADLINE,
}


class CommandError(Exception):
    """What was asked cannot be asked of this server, or its result not written. `hint` says what
    to do."""

    def __init__(self, message: str, hint: str = "", code: ExitCode = ExitCode.INVALID) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def call_server(connection: Connection, work: Callable[[OmniClient], Awaitable[T]]) -> T:
    """Runs `work` with a client of the server; its errors end the command."""
    try:
        import omni_grpc_client as client
    except ImportError as error:
        raise fail(
            f"this command needs the client: {error}",
            ExitCode.OTHER,
            "install it: pip install omni-grpc-client (in the repository: clients/python)",
        ) from None

    async def run() -> T:
        async with unconnected as connected:
            return await work(connected)

    unconnected = _client(connection)
    try:
        return asyncio.run(run())
    except client.OmniCallError as error:
        raise call_failed(error, connection.target) from None
    except client.OmniClientError as error:
        hint = "is that an omni-grpc server of this version?"
        raise fail(f"{connection.target}: {error}", ExitCode.OTHER, hint) from None
    except CommandError as error:
        raise fail(error, error.code, error.hint) from None
    except BrokenPipeError:
        # Whoever read our text has enough: typer ends the command in silence.
        raise
    except OSError as error:
        raise fail(error, ExitCode.OTHER) from None
    except KeyboardInterrupt:
        typer.echo("\nomni-grpc: interrupted", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _client(connection: Connection) -> OmniClient:
    """The client that the options describe; what is wrong with them ends the command."""
    import omni_grpc_client as client

    target = connection.target.strip()
    if not target or target.startswith(("http://", "https://")):
        hint = "localhost:50051, for instance; with TLS: --tls"
        raise fail(f"--target {connection.target!r}: is not HOST:PORT", ExitCode.INVALID, hint)
    files = (connection.tls_ca, connection.tls_cert, connection.tls_key)
    try:
        return client.OmniClient(
            target,
            credentials=client.tls_credentials(*files) if connection.secure else None,
            token=connection.token,
            insecure_token=connection.insecure,
            retry=client.RetryPolicy(max_attempts=connection.retries + 1, total=math.inf),
        )
    except client.InsecureTokenError as error:
        hint = "use TLS (--tls, --tls-ca), or --insecure where the network between is trusted"
        raise fail(error, ExitCode.INVALID, hint) from None
    except (OSError, ValueError) as error:
        raise fail(error) from None


def call_failed(error: OmniCallError, target: str) -> typer.Exit:
    """Says what the server's status says, with the wrong fields and what to do."""
    kind = f"{error.code} {error.reason}".rstrip()
    # The server's text often names the fields itself.
    fields = [
        f"  {violation.field}: {violation.description}"
        for violation in error.violations
        if violation.field not in error.message
    ]
    message = "\n".join([f"{kind}: {error.message}", *fields])
    return fail(message, CODES.get(error.code, ExitCode.OTHER), _hint(error, target))


def _hint(error: OmniCallError, target: str) -> str:
    match error.code, error.reason:
        case "UNAVAILABLE", "":
            return (
                f"no server at {target}: start one with `omni-grpc serve` "
                "(and where it has TLS, give --tls-ca here)"
            )
        case "NOT_FOUND", "PIPELINE_NOT_FOUND":
            return f"omni-grpc describe --target {target} lists what is served"
        case "DEADLINE_EXCEEDED", "" | "DEADLINE":
            return "give a longer --timeout, within the limit that omni-grpc describe shows"
        case "ALREADY_EXISTS", _:
            return "choose another --request-id, or leave it out"
        case "UNIMPLEMENTED", "":
            return f"{target} serves something else, or an older release of omni-grpc"
        case "UNAUTHENTICATED", _:
            return f"give a token: --token, or the environment's {TOKEN_VARIABLE}"
        case "INTERNAL", _ if error.request_id:
            return f"the server's log has the cause, request {error.request_id}"
    if error.retry_after is not None:
        return f"try again in {error.retry_after:g} s"
    return ""
