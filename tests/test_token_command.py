"""`omni-grpc token`: a token is printed once, its hash is kept, and what the file held stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omni_grpc.cli import app
from omni_grpc.tokens import read_tokens
from tests.secured import DIGEST, ENTRY


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
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "tokens.yaml"
    before = f"tokens:\n  - {ENTRY}\n"
    file.write_text(before)
    result = token(*arguments, "--file", file)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert file.read_text() == before and "omni_" not in result.output
