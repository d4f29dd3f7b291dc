"""Bearer tokens: who may call, as which tenant, with which rights.

A file holds no token, but its SHA-256. A plain hash is right here, and a slow one (scrypt, bcrypt)
would be wrong: those make guessing costly where people choose passwords. A token of 256 random bits
cannot be guessed at all, and every call would pay the cost."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from omni_grpc.config import Frozen, read_yaml, reasons
from omni_grpc.errors import ConfigError, Unauthenticated
from omni_grpc.watched import Watched

PREFIX = "omni_"
"""What a token begins with, so that scanners for leaked secrets can know one."""
TOKEN_BYTES = 32
MAX_TOKEN = 4096
"""Most characters of what a client calls its token."""

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class Right(StrEnum):
    """What a token allows."""

    INFER = "infer"
    """To open, feed, steer and abort requests of its tenant."""
    INFO = "info"
    """To read what is served, and the load."""
    ADMIN = "admin"
    """An operator's calls."""


class Entry(Frozen):
    """One token."""

    name: Label
    """Whose it is; for people and logs."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the token's characters, in hexadecimal."""
    tenant: Label
    """Its calls are this tenant's: budgets are, and requests are found within it only."""
    rights: Annotated[tuple[Right, ...], Field(min_length=1)]
    expires: AwareDatetime | None = None
    """From then on it is refused. None: never."""


class TokenFile(Frozen):
    """All tokens. None at all is right: then nobody comes in."""

    tokens: tuple[Entry, ...]

    @model_validator(mode="after")
    def _check(self) -> TokenFile:
        for field in ("name", "sha256"):
            values = [getattr(entry, field) for entry in self.tokens]
            for place, value in enumerate(values):
                if value in values[:place]:
                    raise ValueError(f"tokens[{place}].{field}: an earlier token has the same")
        return self


class Tokens:
    """The tokens of a file, which is read again when it changes. Raises ConfigError if it cannot be
    used, or if it holds no token to begin with."""

    def __init__(self, path: Path) -> None:
        self._file = Watched(f"tokens {path}", (path,), partial(read_tokens, path))
        if not self._file.value:
            raise ConfigError(f"{path}: holds no token: nobody could come in")

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        self._file.refresh()

    def find(self, token: str) -> Entry:
        """The entry of a token that a client gave. Raises Unauthenticated."""
        given = hashlib.sha256(token[:MAX_TOKEN].encode(errors="replace")).hexdigest()
        found = None
        for entry in self._file.value:
            # All of them, in constant time each: how long it takes tells nothing of any.
            if hmac.compare_digest(entry.sha256, given):
                found = entry
        if found is None or len(token) > MAX_TOKEN:
            raise Unauthenticated("the token is not known")
        if found.expires is not None and found.expires <= datetime.now(UTC):
            raise Unauthenticated("the token has expired")
        return found


def read_tokens(path: Path) -> tuple[Entry, ...]:
    """The entries of a file. Raises ConfigError."""
    return parse_tokens(read_yaml(path), path)


def parse_tokens(content: object, path: Path) -> tuple[Entry, ...]:
    """The entries in what a file holds. Raises ConfigError, which names the file."""
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a file of tokens is a mapping with 'tokens'")
    try:
        return TokenFile.model_validate(content).tokens
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(reasons(error))) from None


def make_token() -> tuple[str, str]:
    """A new token and its hash."""
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()
