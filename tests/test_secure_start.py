"""A server starts as safely as it was asked to, or not at all; and its secrets stay its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from omni_grpc.cli import app
from omni_grpc.config import AuthConfig, ServerConfig, load_settings
from omni_grpc.config.listening import address, is_loopback
from omni_grpc.server import Server
from omni_grpc.tokens import make_token, read_tokens
from omni_grpc.v1 import service_pb2_grpc
from tests.certificates import Authority, encrypted
from tests.running import BIN, ServerProcess, text_pipeline
from tests.secured import DIGEST, ENTRY, INFO, bearer
from tests.support import ROOT

OTHER = ENTRY.replace(DIGEST, "cd" * 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, good and bad."""
    path = tmp_path_factory.mktemp("secure")
    authority = Authority()
    pair = authority.issue()
    pair.write(path)
    authority.issue().write(path, "other")
    encrypted(pair).write(path, "encrypted")
    (path / "half.key").write_bytes(pair.key[: len(pair.key) // 2])
    (path / "ca.crt").write_bytes(authority.pem)
    for name, content in {
        "good.yaml": f"tokens: [{ENTRY}]",
        "empty.yaml": "",
        "none.yaml": "tokens: []",
        "broken.yaml": "tokens: [\n",
        "right.yaml": f"tokens: [{ENTRY.replace('infer', 'root')}]",
        "twice.yaml": f"tokens: [{ENTRY}, {OTHER}]",
        "same.yaml": f"tokens: [{ENTRY}, {ENTRY.replace('name: a', 'name: b')}]",
        "raw.yaml": f"tokens: [{ENTRY.replace(DIGEST, 'omni_the-token-itself')}]",
        "zone.yaml": f"tokens: [{ENTRY[:-1]}, expires: 2027-01-01}}]",
        "settings.yaml": "port: 0\ncolour: red\n",
        "list.yaml": "- port: 0\n",
        "words.pem": "no certificate",
    }.items():
        (path / name).write_text(content)
    return path


GOOD = "--tls-cert tls.crt --tls-key tls.key"
REFUSED = {
    "certificate that is missing": ("--tls-cert no.crt --tls-key tls.key", "no.crt: No such file"),
    "certificate that is a folder": ("--tls-cert . --tls-key tls.key", "Is a directory"),
    "certificate that is none": ("--tls-cert words.pem --tls-key tls.key", "not a certificate"),
    "key that is missing": ("--tls-cert tls.crt --tls-key no.key", "no.key: No such file"),
    "key of another": ("--tls-cert tls.crt --tls-key other.key", "key values mismatch"),
    "key that is cut": ("--tls-cert tls.crt --tls-key half.key", "half.key: not a certificate"),
    "key with a password": ("--tls-cert tls.crt --tls-key encrypted.key", "unencrypted"),
    "certificate without a key": ("--tls-cert tls.crt", "tls.key: Field required"),
    "client CA without TLS": ("--tls-client-ca ca.crt", "tls.cert: Field required"),
    "client CA that is none": (f"{GOOD} --tls-client-ca words.pem", "words.pem: holds no cert"),
    "client CA that is missing": (f"{GOOD} --tls-client-ca no.crt", "no.crt: No such file"),
    "tokens that are missing": ("--tokens no.yaml", "no.yaml: No such file"),
    "tokens in an empty file": ("--tokens empty.yaml", "empty.yaml: a file of tokens is"),
    "no token": ("--tokens none.yaml", "none.yaml: holds no token"),
    "tokens that are not YAML": ("--tokens broken.yaml", "broken.yaml: not YAML: line 2"),
    "unknown right": ("--tokens right.yaml", "tokens[0].rights[0]: Input should be 'infer'"),
    "one name twice": ("--tokens twice.yaml", "tokens[1].name: an earlier token has the same"),
    "one token twice": ("--tokens same.yaml", "tokens[1].sha256: an earlier token has the same"),
    "token in place of its hash": ("--tokens raw.yaml", "tokens[0].sha256: String should match"),
    "end without a zone": ("--tokens zone.yaml", "tokens[0].expires"),
    "plain text for others": ("--host 0.0.0.0", "others can reach 0.0.0.0"),
    "plain text by name": ("--host example.org", "others can reach example.org"),
    "plain admin for others": ("--admin-port 0 --admin-host 0.0.0.0", "others can reach 0.0.0.0"),
    "admin for everyone": (
        "--admin-port 0 --admin-host 0.0.0.0 --insecure",
        "AdminService needs tokens (auth) or client certificates",
    ),
    "admin for everyone with TLS": (
        f"--admin-port 0 --admin-host 0.0.0.0 {GOOD}",
        "AdminService needs tokens (auth) or client certificates",
    ),
    "settings that are missing": ("--config no.yaml", "no.yaml: No such file"),
    "settings that are a list": ("--config list.yaml", "settings are a mapping"),
    "unknown setting": ("--config settings.yaml", "colour: Extra inputs are not permitted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_stops_the_start_with_one_line(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = REFUSED[name]
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments.split()])
    assert result.exit_code == 2, result
    (line,) = result.stderr.splitlines()
    assert line.startswith("omni-grpc: ") and message in line
    assert "the-token-itself" not in line


def test_refused_start_leaves_nothing(folder: Path) -> None:
    arguments = ("--port", "0", "--tokens", str(folder / "none.yaml"))
    with ServerProcess("echo", arguments=arguments) as server:
        assert server.await_exit() == 2
        assert len(server.log.splitlines()) == 1
        assert list(server.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("unix:/tmp/x", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_address_of_ipv6_is_in_brackets() -> None:
    assert [address(host, 1) for host in ("::1", "[::1]", "h")] == ["[::1]:1", "[::1]:1", "h:1"]


async def test_ipv6_is_served() -> None:
    server = Server(ServerConfig(host="::1", port=0), [text_pipeline("six")])
    try:
        await server.start()
    except Exception as error:
        pytest.skip(f"this machine has no ::1: {error}")
    finally:
        await server.stop(0)


# ---------------------------------------------------------------- settings


def test_options_are_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "port: 1\nmax_requests: 7\ntls: {cert: a.crt, key: a.key}\nmedia: {http: true}\n"
    )
    settings = load_settings(file, {"port": 2, "tls.cert": "b.crt", "auth.tokens": "t.yaml"})
    assert (settings.port, settings.max_requests, settings.media.http) == (2, 7, True)
    assert settings.tls is not None and (settings.tls.cert, settings.tls.key) == ("b.crt", "a.key")
    assert settings.auth == AuthConfig(tokens="t.yaml")
    assert load_settings(None, {}) == ServerConfig()
    (tmp_path / "empty.yaml").write_text("")
    assert load_settings(tmp_path / "empty.yaml", {}) == ServerConfig()


# ---------------------------------------------------------------- docs/security.md


def blocks(language: str) -> list[str]:
    """The page's code blocks of a language."""
    page = (ROOT / "docs/security.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(folder: Path, script: str, **environment: str) -> str:
    """What a shell prints in that folder; it must succeed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=f'export PATH="{BIN}:$PATH"\n{script}\n',
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(60)  # several commands, each a process
def test_the_page_is_true_and_no_secret_is_in_the_log(folder: Path, tmp_path: Path) -> None:
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    make, serve, call = blocks("sh")
    secret = run(tmp_path, f'{make}\nprintf %s "$OMNI_GRPC_TOKEN"')
    arguments = shlex.split(serve.replace("--host 0.0.0.0", "--port 0").replace("50052", "0"))[2:]
    arguments = [str(tmp_path / one) if (tmp_path / one).exists() else one for one in arguments]
    environment = {"OMNI_GRPC_TOKEN": "", "GRPC_VERBOSITY": "INFO"}
    with ServerProcess("echo", arguments=arguments, environment=environment) as server:
        port = server.await_serving()
        assert server.await_log(r"health alone on 127.0.0.1:\d+")
        target = f"localhost:{port}"
        call = call.replace("localhost:50051", target)
        call = re.sub(r"(omni-grpc \w+)", rf"\1 --target {target}", call)
        printed = run(tmp_path, call, OMNI_GRPC_TOKEN=secret)
        assert "echo (default)" in printed and printed.count("Hello") == 2
        credentials = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        with grpc.secure_channel(target, credentials) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            for wrong in (secret[:-1] + "!", "omni_nobody-knows-this"):
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    stub.GetServerInfo(INFO, metadata=bearer(wrong))
                assert wrong not in server.log
        assert server.end() == 0
        assert "GetServerInfo OK" in server.log and "UNAUTHENTICATED" in server.log
        assert "grpcurl -cacert ROOTS -H 'authorization: Bearer TOKEN'" in server.log
        key = (tmp_path / "tls.key").read_text().splitlines()[1]
        for kept in (
            secret,
            secret.removeprefix("omni_"),
            key,
            read_tokens(tmp_path / "tokens.yaml")[0].sha256,
        ):
            assert kept not in server.log


def test_the_pages_settings_are_settings(tmp_path: Path) -> None:
    settings, tokens = blocks("yaml")
    (tmp_path / "settings.yaml").write_text(settings)
    loaded = load_settings(tmp_path / "settings.yaml", {})
    assert loaded.tls is not None and loaded.auth is not None and not loaded.auth.open_reflection
    (tmp_path / "tokens.yaml").write_text(tokens.replace("0c3f…", make_token()[1]))
    assert read_tokens(tmp_path / "tokens.yaml")
