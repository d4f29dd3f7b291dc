"""What listens for calls, and how: options, TLS, tokens, alike on every port."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import grpc

from omni_grpc.auth import Auth
from omni_grpc.config import ServerConfig
from omni_grpc.config.listening import address
from omni_grpc.errors import StartError
from omni_grpc.interceptors import Edge
from omni_grpc.observation import Observation
from omni_grpc.tls import Certificates
from omni_grpc.tokens import Tokens
from omni_grpc.watched import Watcher


class Listeners:
    """Makes listeners. Raises ConfigError where a setting of their security cannot be honoured.

    Certificates and tokens are read again, from `start` to `stop`, when their files change."""

    def __init__(self, settings: ServerConfig, pod: str) -> None:
        self._settings = settings
        tls, auth = settings.tls, settings.auth
        self._certificates = None if tls is None else Certificates(tls)
        self._tokens = None if auth is None else Tokens(Path(auth.tokens))
        self._edge = Edge(pod)
        self._interceptors: list[grpc.aio.ServerInterceptor] = [self._edge]
        if auth is not None and self._tokens is not None:
            self._interceptors.append(Auth(self._tokens, open_reflection=auth.open_reflection))
        self._watcher = Watcher(one for one in (self._certificates, self._tokens) if one)
        self._credentials: list[grpc.ServerCredentials] = []

    def observe(self, observation: Observation) -> None:
        """What hears of every call's end, from now on."""
        self._edge.observation = observation

    @property
    def idle_s(self) -> float:
        """Seconds since the last call of the service came."""
        return self._edge.idle_s

    @property
    def calls(self) -> Mapping[str, int]:
        """How many calls of each method are open."""
        return self._edge.calls

    def make(self, *, open_to_all: bool = False) -> grpc.aio.Server:
        """A listener without a service and a port yet. `open_to_all`: without tokens, and without
        what the service's own methods need around them."""
        return grpc.aio.server(
            interceptors=() if open_to_all else tuple(self._interceptors),
            options=channel_options(self._settings),
        )

    def bind(
        self, server: grpc.aio.Server, host: str, port: int, *, plaintext: bool = False
    ) -> int:
        """Gives a listener its port, with TLS where that is on. The port's number; raises
        StartError if it cannot be had."""
        where = address(host, port)
        try:
            if plaintext or self._certificates is None:
                return server.add_insecure_port(where)
            credentials = self._certificates.credentials()
            self._credentials.append(credentials)
            return server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {where}: {error}") from None

    def start(self) -> None:
        """Begins to watch the files."""
        self._watcher.start()

    def stop(self) -> None:
        """Ends watching. Idempotent."""
        self._watcher.stop()


def channel_options(settings: ServerConfig) -> list[tuple[str, int]]:
    """Options of a listener. Each has a test of its behaviour: the core ignores names that it
    doesn't know."""
    connections = settings.connections
    options = [
        # Two servers on one port would split the traffic silently.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(connections.min_ping_interval)),
        ("grpc.keepalive_time_ms", _ms(connections.keepalive_time)),
        # By grpcio's own keepalive_timeout_ms, which does nothing in 1.85, it would be a minute.
        ("grpc.http2.ping_timeout_ms", _ms(connections.keepalive_timeout)),
    ]
    if connections.max_age is not None:
        # Without a grace: with one, calls that run would be cut at its end.
        options.append(("grpc.max_connection_age_ms", _ms(connections.max_age)))
    if connections.max_idle is not None:
        options.append(("grpc.max_connection_idle_ms", _ms(connections.max_idle)))
    if connections.max_concurrent_streams is not None:
        options.append(("grpc.max_concurrent_streams", connections.max_concurrent_streams))
    return options


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))
