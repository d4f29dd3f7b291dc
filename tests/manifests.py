"""What tests of `k8s/` share: a kubectl, the builds, copies of both to break."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.manifests.build import K8S, Build, NoKubectlError, builds, kubectl

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
GONE = object()
"""In place of a value: the field is removed."""


def tool() -> Path:
    """A kubectl that builds components; skips the test where none can be had."""
    try:
        return kubectl()
    except NoKubectlError as error:
        pytest.skip(str(error))


@cache
def built() -> dict[str, Build]:
    """All builds, by `overlays/NAME` and `components/NAME`."""
    tool()
    return {build.name: build for build in builds()}


def changed(build: Build, target: str, path: str, value: object) -> Build:
    """The build with one field of `Kind/name` set, or removed."""
    objects = copy.deepcopy(list(build.objects))
    kind, _, name = target.partition("/")
    node: Any
    (node,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    *way, last = (int(part) if part.isdigit() else part for part in parts(path))
    for part in way:
        node = node[part]
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    return Build(build.name, objects)


def parts(path: str) -> list[str]:
    """A path's parts; `~` stands for a dot in one."""
    return [part.replace("~", ".") for part in path.split(".")]
