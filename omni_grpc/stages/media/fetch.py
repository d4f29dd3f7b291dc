"""Reading http(s) URIs that a client names, without lending it our place in the network.

Every address that a name resolves to must be public, and the connection goes to one of those very
addresses: the name is not asked again, so its answer cannot change between check and use. That
holds for each redirect too. httpcore below httpx: no proxies or credentials of the environment, no
cookies, no redirects and no decompression of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import cache
from ipaddress import IPv6Address, ip_address, ip_network
from ssl import SSLContext
from typing import Any
from urllib.parse import SplitResult, urldefrag, urljoin, urlsplit

import httpcore

from omni_grpc.config import MediaPolicy
from omni_grpc.errors import InvalidField, MediaSource
from omni_grpc.stages.media.decoded import Unfit

_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429)
"""Client errors by their number that are the source's by their cause."""


MAX_HOST = 253
"""Longest name in the DNS (RFC 1035)."""

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""A host's addresses. Raises socket.gaierror."""


async def look_up(host: str, port: int) -> list[str]:
    """What the system's resolver says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def fetch(
    uri: str,
    policy: MediaPolicy,
    path: str,
    *,
    lookup: Lookup = look_up,
    network: httpcore.AsyncNetworkBackend | None = None,
) -> tuple[bytes, str]:
    """The body behind a URI and its content type. Redirects are followed, within the policy.
    `lookup` and `network` stand for the system's.

    Raises InvalidField for an address that may not be reached, Unfit for content that is not to be
    had or too large, MediaSource where the source fails or is slow."""
    try:
        async with asyncio.timeout(policy.fetch_timeout):
            guarded = GuardedNetwork(policy.private_networks, path, lookup, network)
            async with aclosing(guarded):
                return await _follow(uri, policy, path, guarded)
    except TimeoutError:
        raise MediaSource(f"{path}: its source took over {policy.fetch_timeout:g} s") from None
    except (httpcore.NetworkError, httpcore.TimeoutException):
        raise MediaSource(f"{path}: its source cannot be reached") from None
    except httpcore.ProtocolError:
        raise MediaSource(f"{path}: its source broke off or does not speak HTTP") from None


async def _follow(
    uri: str, policy: MediaPolicy, path: str, network: GuardedNetwork
) -> tuple[bytes, str]:
    async with httpcore.AsyncConnectionPool(
        ssl_context=_ssl_context(), network_backend=network, max_keepalive_connections=0
    ) as pool:
        for _ in range(policy.max_redirects + 1):
            parts = check_url(uri, policy, path)
            async with pool.stream("GET", uri, headers=_headers(parts)) as response:
                if response.status not in _REDIRECTS:
                    return await _body(response, policy.max_bytes, path)
                headers = {name.lower(): value for name, value in response.headers}
            location = headers.get(b"location")
            if location is None:
                raise MediaSource(f"{path}: its source redirects to nowhere")
            uri = _redirected(uri, location.decode("latin-1"), path)
    raise Unfit(f"is behind more than {policy.max_redirects} redirects")


def _redirected(uri: str, location: str, path: str) -> str:
    try:
        return urldefrag(urljoin(uri, location)).url
    except ValueError:
        raise MediaSource(f"{path}: its source redirects to nowhere") from None


def _headers(parts: SplitResult) -> list[tuple[str, str]]:
    return [
        ("Host", parts.netloc),
        ("User-Agent", "omni-grpc"),
        ("Accept", "*/*"),
        # What is compressed on the way could be a thousand times larger here.
        ("Accept-Encoding", "identity"),
    ]


async def _body(response: httpcore.Response, most: int, path: str) -> tuple[bytes, str]:
    headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
    status = response.status
    if status >= 500 or status in _BUSY:
        raise MediaSource(f"{path}: its source answered {status}")
    if status != 200:
        raise Unfit(f"is not to be had: its source answered {status}")
    if headers.get(b"content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise Unfit("was sent compressed, though that was not asked for")
    length = headers.get(b"content-length", "")
    if length.isdigit() and int(length) > most:
        raise Unfit(f"is larger than {most} bytes")
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > most:
            raise Unfit(f"is larger than {most} bytes")
    return bytes(body), headers.get(b"content-type", "")


def check_url(uri: str, policy: MediaPolicy, path: str) -> SplitResult:
    """The URL's parts. Raises InvalidField for one that is not read here, whoever named it."""
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")
    except (ValueError, UnicodeError):
        raise InvalidField(path, "is not a URL") from None
    if parts.scheme not in ("http", "https") or not host or len(host) > MAX_HOST:
        raise InvalidField(path, "leads to something else than an http(s): URL")
    if not (uri.isascii() and uri.isprintable()) or " " in uri:
        raise InvalidField(path, "holds characters that a URL cannot hold")
    if parts.username is not None or parts.password is not None:
        raise InvalidField(path, "holds a user or password")
    if policy.hosts and host not in policy.hosts:
        raise InvalidField(path, f"leads to the host {host!r}, which is not among the allowed")
    return parts


_GLOBAL_UNICAST = ip_network("2000::/3")


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, however it is written."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        # Addresses that carry an IPv4 address are as public as that one is.
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1]) or _nat64(ip)
        if inner:
            return is_public(str(inner))
        # All that is allotted for it (RFC 4291); the rest is special, of old or to come.
        return ip in _GLOBAL_UNICAST and ip.is_global
    return ip.is_global and not ip.is_multicast


def _nat64(ip: IPv6Address) -> Any:
    """The IPv4 address in one below 64:ff9b::/96 (RFC 6052)."""
    return ip_address(ip.packed[-4:]) if ip.packed[:12] == b"\0\x64\xff\x9b" + b"\0" * 8 else None


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only, unless `private` is set."""

    def __init__(
        self,
        private: bool,
        path: str,
        lookup: Lookup,
        inner: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._inner = inner or httpcore.AnyIOBackend()
        self._private = private
        self._path = path
        self._lookup = lookup
        self._opened: list[httpcore.AsyncNetworkStream] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection to the first of the host's addresses that answers."""
        error: Exception = httpcore.ConnectError("no address")
        for address in await self._resolve(host, port):
            try:
                stream = await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
                self._opened.append(stream)
                return stream
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failure:
                error = failure
        raise error

    async def aclose(self) -> None:
        """Closes every connection: httpcore forgets one whose TLS handshake is cancelled."""
        for stream in self._opened:
            await stream.aclose()

    async def _resolve(self, host: str, port: int) -> list[str]:
        try:
            addresses = await self._lookup(host, port)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                raise Unfit("is at a host that does not exist") from None
            raise MediaSource(f"{self._path}: its host cannot be looked up now") from None
        if not self._private and not all(is_public(address) for address in addresses):
            raise InvalidField(self._path, "leads to an address that is not public")
        return addresses


@cache
def _ssl_context() -> SSLContext:
    return httpcore.default_ssl_context()
