"""A server starts as safely as it was asked to, or not at all; and its secrets stay its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omni_grpc.cli import app
from omni_grpc.config import AuthConfig, ServerConfig, load_settings
from omni_grpc.config.listening import address, is_loopback
from omni_grpc.server import Server
from omni_grpc.tokens import make_token, read_tokens
from tests.certificates import Authority, encrypted
from tests.running import BIN, ServerProcess, text_pipeline
from tests.support import ROOT

DIGEST = "ab" * 32
ENTRY = f"{{name: a, sha256: {DIGEST}, tenant: t, rights: [infer]}}"
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


def serve(folder: Path, arguments: str) -> Result:
    """`omni-grpc serve` that does not come to serve."""
    words = [str(folder / word) if (folder / word).suffix else word for word in arguments.split()]
    return CliRunner().invoke(app, ["serve", "--pipeline", "echo", "--port", "0", *words])


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


# ---------------------------------------------------------------- omni-grpc token


def token(*arguments: object) -> Result:
    """`omni-grpc token`."""
    return CliRunner().invoke(app, ["token", *(str(argument) for argument in arguments)])


def test_token_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    more = ("--tenant", "acme", "--right", "infer", "--file", file)
    one, two = token("one", *more), token("two", *more, "--right", "info", "--days", 7)
    assert (one.exit_code, two.exit_code) == (0, 0), (one.output, two.output)
    secrets = [result.stdout.strip() for result in (one, two)]
    assert all(re.fullmatch(r"omni_[\w-]{43}", secret) for secret in secrets)
    assert one.stderr == two.stderr == ""
    first, second = read_tokens(file)
    assert (first.name, first.tenant, first.rights) == ("one", "acme", ("infer",))
    assert second.rights == ("infer", "info") and second.expires is not None
    assert not any(secret in file.read_text() for secret in secrets)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.yaml"]


def test_token_without_a_file_gives_the_entry_to_add(tmp_path: Path) -> None:
    result = token("one", "--tenant", "acme", "--right", "admin")
    file = tmp_path / "tokens.yaml"
    file.write_text(result.stderr)
    assert [entry.name for entry in read_tokens(file)] == ["one"]
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        "# ours\ntokens:\n- " + ENTRY + "\n",
        "# ours\ntokens:\n    - " + ENTRY + "  # a\n",
        "# ours\ntokens: []\n",
        "# ours\ntokens:\n  - name: a\n    sha256: '" + DIGEST + "'\n    tenant: t\n    rights:\n"
        "    - infer",
    ],
)
def test_token_keeps_what_the_file_holds(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(content)
    file.chmod(0o640)
    before = read_tokens(file)
    result = token("new", "--tenant", "acme", "--right", "infer", "--file", file)
    assert result.exit_code == 0, result.stderr
    assert read_tokens(file)[:-1] == before and file.read_text().startswith("# ours\n")
    assert file.stat().st_mode & 0o777 == 0o640


def test_token_is_not_written_where_it_would_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    content = f"tokens: [{ENTRY}]\n"
    file.write_text(content)
    result = token("new", "--tenant", "acme", "--right", "infer", "--file", file)
    assert result.exit_code == 2 and "add it yourself" in result.stderr
    assert file.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "--tenant", "t", "--right", "infer"), "there is a token named 'a' already"),
        (("b c", "--tenant", "t", "--right", "infer"), "name: String should match"),
        (("b", "--tenant", "", "--right", "infer"), "tenant: String should match"),
        (("b", "--tenant", "t", "--right", "root"), "'root' is not one of"),
        (("b", "--tenant", "t"), "Missing option '--right'"),
    ],
)
def test_token_that_cannot_be_leaves_the_file(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = folder / "good.yaml"
    before = file.read_text()
    result = token(*arguments, "--file", file)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert file.read_text() == before and "omni_" not in result.output


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
        for wrong in (secret[:-1] + "!", "omni_nobody-knows-this"):
            with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
                run(
                    tmp_path,
                    f"omni-grpc describe --target {target} --tls-ca ca.crt --token {wrong}",
                )
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
