"""`omni-grpc token`: makes a bearer token."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from omni_grpc.cli.failure import fail
from omni_grpc.config import reasons
from omni_grpc.errors import ConfigError
from omni_grpc.tokens import Entry, Right, make_token, parse_tokens, read_tokens


def token(
    name: Annotated[str, typer.Argument(help="Whose token it is.")],
    tenant: Annotated[str, typer.Option(help="Tenant that its calls count for.")],
    right: Annotated[list[Right], typer.Option(help="What it allows. Repeatable.")],
    days: Annotated[
        float | None,
        typer.Option(min=0, max=36500, help="Days until it expires.", show_default="never"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to add its entry to. It is made if need be."),
    ] = None,
) -> None:
    """Makes a bearer token and prints it, once: what the server keeps is its hash.

    Without --file, the entry for the server's file goes to stderr."""
    secret, digest = make_token()
    try:
        entry = Entry(
            name=name,
            sha256=digest,
            tenant=tenant,
            rights=tuple(dict.fromkeys(right)),
            expires=None if days is None else _in_days(days),
        )
        if file is not None:
            _append(file, entry)
    except (ConfigError, OSError) as error:
        raise fail(error) from None
    except ValidationError as error:
        raise fail("; ".join(reasons(error))) from None
    if file is None:
        typer.echo("tokens:\n" + _text(entry), err=True, nl=False)
    typer.echo(secret)


def _in_days(days: float) -> datetime:
    return (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)


def _text(entry: Entry, indent: str = "  ") -> str:
    """The entry as an item of a YAML list."""
    fields = entry.model_dump(mode="json", exclude_none=True)
    line = yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=1000)
    return f"{indent}- {line}"


def _append(file: Path, entry: Entry) -> None:
    """Adds the entry behind all that the file holds, comments and all. The file is replaced in one
    step: a server that reads it meanwhile sees the old or the new."""
    file = file.resolve()
    text = file.read_text(encoding="utf-8") if file.exists() else "tokens:\n"
    before = read_tokens(file) if file.exists() else ()
    if entry.name in {one.name for one in before}:
        raise ConfigError(f"{file}: there is a token named {entry.name!r} already")
    # A list that is empty has no lines to go below; others may be indented or not.
    text = text.rstrip().removesuffix("[]") + "\n"
    for indent in dict.fromkeys(["  ", *re.findall(r"^( *)- ", text, re.MULTILINE)]):
        candidate = text + _text(entry, indent)
        with suppress(yaml.YAMLError, ConfigError):
            if parse_tokens(yaml.safe_load(candidate), file) == (*before, entry):
                break
    else:
        raise ConfigError(f"{file}: not a YAML list that ends with its last line; add it yourself")
    _replace(file, candidate)


def _replace(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as new:
            new.write(text)
        if file.exists():
            # The server, which may be another user, must be able to read it as before.
            shutil.copymode(file, name)
            with suppress(PermissionError):
                os.chown(name, file.stat().st_uid, file.stat().st_gid)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
