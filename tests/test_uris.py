"""Media by URI: what is read, what is refused, and whose fault it is."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpcore
import pytest

from omni_grpc.config import MediaPolicy
from omni_grpc.errors import InvalidField, InvalidMedia, MediaSource, OmniError
from omni_grpc.stages.media import DecodedImage, load_media
from omni_grpc.stages.media.fetch import fetch, is_public
from omni_grpc.types import Media, Modality
from tests.hostile import ANSWERS, Hostile, head, hostile_server, png
from tests.support import eventually

PATH = "prompt.media[0]"
OPEN = MediaPolicy(http=True, private_networks=True, fetch_timeout=5, max_bytes=1 << 20)
GUARDED = MediaPolicy(http=True, fetch_timeout=5)


@pytest.fixture
async def hostile() -> AsyncIterator[Hostile]:
    """A loopback server that misbehaves on request."""
    async with hostile_server() as server:
        yield server


async def load(uri: str, policy: MediaPolicy = OPEN, **fields: Any) -> DecodedImage:
    """The picture behind a URI."""
    decoded = await load_media(Media(Modality.IMAGE, uri=uri, **fields), policy, PATH)
    assert isinstance(decoded, DecodedImage)
    return decoded


async def refused(uri: str, policy: MediaPolicy = OPEN, **fields: Any) -> OmniError:
    """The error that a URI ends in."""
    with pytest.raises(OmniError) as caught:
        await load(uri, policy, **fields)
    assert caught.value.message.startswith(PATH)
    return caught.value


def places(error: OmniError) -> list[str]:
    """The paths of what is wrong."""
    return [violation.field for violation in error.violations]


# ---------------------------------------------------------------- data:


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64," + base64.b64encode(png()).decode(),
        "DATA:;base64," + base64.b64encode(png()).decode(),
        "data:image/png;name=a;base64," + quote(base64.b64encode(png()).decode()),
        "data:image/png," + quote(png()),
    ],
)
async def test_data_uris_are_read_always(uri: str) -> None:
    assert (await load(uri, MediaPolicy())).image.size == (8, 6)


@pytest.mark.parametrize(
    ("uri", "kind", "place"),
    [
        ("data:image/png;base64", InvalidField, f"{PATH}.uri"),
        ("data:image/png;base64,%%%", InvalidField, f"{PATH}.uri"),
        ("data:image/png;base64,abc", InvalidField, f"{PATH}.uri"),
        ("data:image/png;base64,", InvalidMedia, PATH),
        ("data:,", InvalidMedia, PATH),
        ("data:text/html,<p>", InvalidMedia, PATH),
        ("data:;base64," + "A" * 2_000_000, InvalidMedia, PATH),
        ("data:," + "x" * 1_100_000, InvalidMedia, PATH),
        ("data:," + "x" * 4_000_000, InvalidMedia, PATH),
        ("", InvalidField, f"{PATH}.uri"),
        ("picture.png", InvalidField, f"{PATH}.uri"),
        ("/etc/passwd", InvalidField, f"{PATH}.uri"),
        ("ftp://127.0.0.1/x", InvalidField, f"{PATH}.uri"),
        ("gopher://127.0.0.1/x", InvalidField, f"{PATH}.uri"),
        ("http:///x", InvalidField, f"{PATH}.uri"),
        ("http://[::1", InvalidField, f"{PATH}.uri"),
        ("http://127.0.0.1:99999/", InvalidField, f"{PATH}.uri"),
        ("http://a b/", InvalidField, f"{PATH}.uri"),
        ("http://127.0.0.1/\r\nX-Evil: 1", InvalidField, f"{PATH}.uri"),
        ("http://user:secret@127.0.0.1/", InvalidField, f"{PATH}.uri"),
        ("http://" + "a" * 9000, InvalidField, f"{PATH}.uri"),
        ("http://" + "a." * 200 + "b/", InvalidField, f"{PATH}.uri"),
    ],
)
async def test_a_bad_uri_is_the_clients_fault(uri: str, kind: type[OmniError], place: str) -> None:
    error = await refused(uri)
    assert type(error) is kind
    assert places(error) == [place]


async def test_nothing_but_data_is_read_unless_configured(hostile: Hostile) -> None:
    for uri in (f"{hostile.url}/picture", "file:///etc/hostname"):
        error = await refused(uri, MediaPolicy())
        assert (type(error), places(error)) == (InvalidField, [f"{PATH}.uri"])
    assert hostile.requests == []


# ---------------------------------------------------------------- file:


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root, with a secret beside it and ways that lead there."""
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "a picture.png").write_bytes(png())
    (root / "folder" / "b.png").write_bytes(png())
    (root / "inside.png").symlink_to(root / "folder" / "b.png")
    (tmp_path / "secret.png").write_bytes(png())
    (root / "outside.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    (root / "large.png").write_bytes(bytes(1 << 21))
    return root


async def test_files_below_the_media_root_are_read(root: Path) -> None:
    policy = MediaPolicy(root=str(root), max_bytes=1 << 20)
    for name in ("a%20picture.png", "folder/b.png", "folder/../inside.png"):
        assert (await load(f"file://{root}/{name}", policy)).image.size == (8, 6)
        assert (await load(f"file://localhost{root}/{name}", policy)).image.size == (8, 6)


@pytest.mark.parametrize(
    "name",
    [
        "outside.png",
        "up/secret.png",
        "../secret.png",
        "%2e%2e/secret.png",
        "folder/%2e%2e%2f../secret.png",
        "loop",
        "pipe",
        "folder",
        "",
        "absent.png",
        "a%00.png",
        "x" * 5000,
    ],
)
async def test_nothing_outside_the_media_root_is_told_of(root: Path, name: str) -> None:
    error = await refused(f"file://{root}/{name}", MediaPolicy(root=str(root)))
    assert error.message == f"{PATH}.uri: is no file that can be read below the media root"


async def test_a_file_elsewhere_or_too_large_is_refused(root: Path) -> None:
    policy = MediaPolicy(root=str(root), max_bytes=1 << 20)
    assert places(await refused("file:///etc/hostname", policy)) == [f"{PATH}.uri"]
    assert places(await refused(f"file://other.example{root}/inside.png", policy)) == [
        f"{PATH}.uri"
    ]
    large = await refused(f"file://{root}/large.png", policy)
    assert type(large) is InvalidMedia and "larger" in large.message


# ---------------------------------------------------------------- http(s): what comes


@pytest.mark.parametrize("path", ["/picture", "/untyped", "/octets", "/to-picture", "/twice"])
async def test_a_picture_is_fetched(hostile: Hostile, path: str) -> None:
    assert (await load(hostile.url + path)).image.size == (8, 6)


async def test_a_request_brings_nothing_of_ours(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login root password secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    await load(f"{hostile.url}/to-picture")
    assert len(hostile.requests) == 2
    for request in hostile.requests:
        line, *headers = request.strip().split("\r\n")
        assert line.startswith("GET /")
        assert {header.split(":")[0].lower() for header in headers} == {
            "host",
            "user-agent",
            "accept",
            "accept-encoding",
        }
        assert "Accept-Encoding: identity" in headers
        assert f"Host: 127.0.0.1:{hostile.port}" in headers


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/web", InvalidMedia),
        ("/not-a-picture", InvalidMedia),
        ("/compressed", InvalidMedia),
        ("/archive", InvalidMedia),
        ("/404", InvalidMedia),
        ("/403", InvalidMedia),
        ("/204", InvalidMedia),
        ("/206", InvalidMedia),
        ("/claims-much", InvalidMedia),
        ("/endless", InvalidMedia),
        ("/loop", InvalidMedia),
        ("/to-file", InvalidField),
        ("/to-ftp", InvalidField),
        ("/to-data", InvalidField),
        ("/to-user", InvalidField),
        ("/to-broken", MediaSource),
        ("/429", MediaSource),
        ("/500", MediaSource),
        ("/503", MediaSource),
        ("/cut", MediaSource),
        ("/cut-chunk", MediaSource),
        ("/no-http", MediaSource),
        ("/nothing", MediaSource),
        ("/headers", MediaSource),
        ("/nowhere", MediaSource),
    ],
)
async def test_whose_fault_it_is(hostile: Hostile, path: str, kind: type[OmniError]) -> None:
    error = await refused(hostile.url + path)
    assert type(error) is kind, error.message
    assert "4711" not in error.message
    if kind is not MediaSource:
        assert places(error) == [PATH if kind is InvalidMedia else f"{PATH}.uri"]


@pytest.mark.parametrize("path", ["/slow", "/hold"])
async def test_a_slow_source_is_left_in_time(hostile: Hostile, path: str) -> None:
    policy = OPEN.model_copy(update={"fetch_timeout": 0.3})
    async with asyncio.timeout(3):
        error = await refused(hostile.url + path, policy)
    assert type(error) is MediaSource and "0.3 s" in error.message


async def test_what_is_too_large_is_not_read(hostile: Hostile) -> None:
    tracemalloc.start()
    try:
        for path in ("/endless", "/compressed", "/archive", "/claims-much"):
            await refused(hostile.url + path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    await asyncio.sleep(0.05)
    sent = hostile.sent
    await asyncio.sleep(0.1)
    assert hostile.sent == sent, "the endless answer is still being read"


async def test_a_source_that_is_not_there_is_unavailable(hostile: Hostile) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = await refused(f"http://127.0.0.1:{unused.getsockname()[1]}/")
    assert type(error) is MediaSource
    # A server without TLS is none that can be reached by https either.
    policy = OPEN.model_copy(update={"fetch_timeout": 1})
    assert type(await refused(f"https://127.0.0.1:{hostile.port}/no-http", policy)) is MediaSource


async def test_a_cancelled_fetch_closes_its_connection(hostile: Hostile) -> None:
    task = asyncio.create_task(
        load(f"{hostile.url}/endless", OPEN.model_copy(update={"max_bytes": 1 << 40}))
    )
    await eventually(lambda: hostile.sent >= 1 << 20, within=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    sent = hostile.sent
    await asyncio.sleep(0.1)
    assert hostile.sent == sent


async def test_only_named_hosts_where_some_are_named(hostile: Hostile) -> None:
    policy = OPEN.model_copy(update={"hosts": ("127.0.0.1",)})
    assert (await load(f"{hostile.url}/picture", policy)).image.size == (8, 6)
    for uri in (f"http://localhost:{hostile.port}/picture", "http://127.0.0.1.example/"):
        assert places(await refused(uri, policy)) == [f"{PATH}.uri"]


# ---------------------------------------------------------------- http(s): where it may go


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.2.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("239.1.1.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("ff0e::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:7f00:1::", False),
        ("2001:db8::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1", "2130706433", "0"]
)
async def test_our_own_network_is_not_reached(hostile: Hostile, host: str) -> None:
    error = await refused(f"http://{host}:{hostile.port}/picture", GUARDED)
    assert type(error) is InvalidField
    assert hostile.requests == []


class Internet(httpcore.AsyncNetworkBackend):
    """A network in which every public address is the loopback server. Counts what it is asked."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._real = httpcore.AnyIOBackend()
        self.connected: list[str] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        if host == "198.51.100.1":
            raise httpcore.ConnectError("nobody is there")
        return await self._real.connect_tcp("127.0.0.1", self._port, timeout)


async def test_a_redirect_into_our_network_is_refused(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    inward = f"http://127.0.0.1:{hostile.port}/picture"
    monkeypatch.setitem(ANSWERS, "/inward", head(302, f"Location: {inward}"))

    async def lookup(host: str, port: int) -> list[str]:
        return ["93.184.216.34"] if host == "public.example" else [host]

    network = Internet(hostile.port)
    with pytest.raises(InvalidField, match="not public"):
        await fetch("http://public.example/inward", GUARDED, PATH, lookup=lookup, network=network)
    assert network.connected == ["93.184.216.34"]
    assert len(hostile.requests) == 1


async def test_one_private_answer_among_public_ones_is_enough(hostile: Hostile) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.1"]

    network = Internet(hostile.port)
    with pytest.raises(InvalidField, match="not public"):
        await fetch("http://two.example/picture", GUARDED, PATH, lookup=lookup, network=network)
    assert network.connected == []


async def test_the_connection_goes_to_the_address_that_was_checked(hostile: Hostile) -> None:
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])

    async def rebinding(host: str, port: int) -> list[str]:
        return next(answers)

    network = Internet(hostile.port)
    body, mime_type = await fetch(
        "http://rebinding.example/picture", GUARDED, PATH, lookup=rebinding, network=network
    )
    assert (body, mime_type) == (png(), "image/png")
    assert network.connected == ["93.184.216.34"], "a name, or another address, was connected to"
    assert "Host: rebinding.example\r\n" in hostile.requests[0]


async def test_the_next_address_is_tried_where_one_does_not_answer(hostile: Hostile) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["198.51.100.1", "127.0.0.1"]

    network = Internet(hostile.port)
    await fetch("http://two.example/picture", OPEN, PATH, lookup=lookup, network=network)
    assert network.connected == ["198.51.100.1", "127.0.0.1"]


@pytest.mark.parametrize(
    ("number", "kind"), [(socket.EAI_NONAME, InvalidMedia), (socket.EAI_AGAIN, MediaSource)]
)
async def test_a_host_that_does_not_exist_is_not_one_that_is_not_found_now(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OmniError]
) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(number, "no")

    monkeypatch.setattr("omni_grpc.stages.media.uri.fetch", _with(lookup))
    assert type(await refused("http://nowhere.example/x", GUARDED)) is kind


def _with(lookup: Any) -> Any:
    async def fetching(uri: str, policy: MediaPolicy, path: str) -> tuple[bytes, str]:
        return await fetch(uri, policy, path, lookup=lookup)

    return fetching
