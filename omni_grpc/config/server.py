"""The server's settings. Sizes in bytes, times in seconds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from omni_grpc.config.base import Frozen, Port, Seconds
from omni_grpc.config.listening import AuthConfig, ConnectionPolicy, TlsConfig, is_loopback


class MediaPolicy(Frozen):
    """What media a request may bring, and from where. Sizes in bytes, times in seconds."""

    max_items: Annotated[int, Field(ge=0, le=1000)] = 16
    max_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Largest file, and most that a URI is read for."""
    max_pixels: Annotated[int, Field(ge=1)] = 40_000_000
    """Of one picture or one frame."""
    max_frames: Annotated[int, Field(ge=1)] = 1024
    max_audio_s: Seconds = 600.0
    max_decoded_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Most memory of one item once it is decoded."""
    http: bool = False
    """Whether http(s) URIs are read."""
    hosts: tuple[str, ...] = ()
    """If not empty: the only hosts that http(s) URIs may name."""
    private_networks: bool = False
    """Whether addresses that are not public may be reached (for tests and closed networks)."""
    root: str | None = None
    """Folder below which file: URIs are read; None: none are."""
    fetch_timeout: Seconds = 10.0
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 3


class ServerConfig(Frozen):
    """Settings of the server. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: Port = 50051
    admin_host: str = "127.0.0.1"
    """Another one than a loopback address needs tokens or mTLS."""
    admin_port: Port | None = None
    """Port of AdminService and channelz; None: neither is served."""
    health_port: Port | None = None
    """Port on `host` of grpc.health.v1 alone, in plain text and without tokens: kubelet's probes
    speak no TLS. None: health is served with all else only."""
    metrics_port: Port | None = None
    """Port on `host` of Prometheus metrics, plain and open to everybody; None: there is none."""
    insecure: bool = False
    """Whether an address that others can reach may be served in plain text."""
    tls: TlsConfig | None = None
    auth: AuthConfig | None = None
    connections: ConnectionPolicy = ConnectionPolicy()
    max_receive_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 64 << 20
    max_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that run or wait at once."""
    max_tenant_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Of these, requests of one tenant."""
    max_tokens_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Tokens that running requests may need: of their prompts and of the longest answers that they
    ask for, both as far as is known beforehand. None: any number; the engines queue what does not
    fit their memory."""
    max_tenant_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of these, tokens of one tenant."""
    max_media_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Bytes of media that running requests may have brought."""
    max_tenant_media_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Of these, bytes of one tenant."""
    queue_bytes: Annotated[int, Field(ge=1 << 16)] = 4 << 20
    """Output that waits for one client before its stages pause."""
    merge_window: Annotated[float, Field(ge=0, le=10)] = 0.0
    """How long text waits for more to join it in one message, which saves most of the server's
    work. The first text of an answer never waits, nothing else does, and an answer's end ends the
    wait. Nor does text wait that another stage takes."""
    busy_merge_window: Annotated[float, Field(ge=0, le=10)] = 0.1
    """How long it waits at most while the server is busy; the busier, the longer. 0: never longer
    than `merge_window`."""
    write_timeout: Seconds = 30.0
    """Longest time that a client may leave an output unread."""
    progress_interval: Seconds = 30.0
    """Longest silence of a stream of outputs: then `progress` is sent. What lies between closes
    streams that are idle, Envoy after 5 minutes, others sooner."""
    drain_delay: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """How long new requests are still taken after SIGTERM, when health already says NOT_SERVING: as
    long as a balancer needs to notice."""
    drain_timeout: Seconds = 30.0
    """Longest time that running requests may go on after that."""
    stop_timeout: Seconds = 10.0
    """Longest time that a replica may take to stop before it is killed."""
    heartbeat_timeout: Annotated[float, Field(ge=2, le=3600)] = 30.0
    """A replica that shows no sign of life for so long is lost."""
    abort_timeout: Seconds = 120.0
    """Longest time that a replica may take to free a task that was aborted (a stage may have to
    finish a step first). One that takes longer is stuck, and is lost."""
    media: MediaPolicy = MediaPolicy()
    ipc: Annotated[str, Field(pattern=r"^(ipc|tcp://[A-Za-z0-9.-]+)$")] = "ipc"
    """How replicas are reached: "ipc", or "tcp://ADDRESS" to listen on for them."""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        hosts = [self.host] if self.admin_port is None else [self.host, self.admin_host]
        for host in hosts:
            if self.tls is None and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"others can reach {host}: give a certificate (tls, --tls-cert), or say that "
                    "plain text is wanted there (insecure, --insecure)"
                )
        verified = self.auth is not None or (self.tls is not None and self.tls.client_ca)
        if self.admin_port is not None and not is_loopback(self.admin_host) and not verified:
            raise ValueError(
                f"others can reach admin_host {self.admin_host}: AdminService needs tokens (auth) "
                "or client certificates (tls.client_ca) there"
            )
        return self
