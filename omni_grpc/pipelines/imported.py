"""What a pipeline names by import path: bridges, transforms, expansions of the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from omni_grpc.errors import ConfigError


def imported(kind: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """The object at the import path `package.module:attribute`.

    Raises ConfigError that names the kind, the built-in ones if there are some, and the cause.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module raises when it is imported
        known = ", ".join(built_in)
        what = f"neither one of {known} nor importable" if known else "not importable"
        raise ConfigError(f"{kind} {name!r}: {what}: {error}") from None
