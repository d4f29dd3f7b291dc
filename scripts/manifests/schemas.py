"""An object against the schema of its kind, strictly: a field that the schema lacks is wrong.

Kubernetes' own kinds are in the package kubernetes-validate. Kinds of others (custom resources)
are checked against `k8s/schemas/<kind>.json`, small JSON schemas of the fields that we use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate

from scripts.manifests.build import K8S, Object
from scripts.manifests.pods import pods_of

GROUPS = {"apps", "autoscaling", "batch", "policy"}
"""Kubernetes' own API groups without a dot; the others end on `.k8s.io`."""
FOREIGN = {"gateway.networking.k8s.io", "inference.networking.k8s.io"}
"""Groups of its side projects, which look like its own."""


def schema_problems(item: Object) -> tuple[str, ...]:
    """What is wrong with one object."""
    return _problems(json.dumps(item, sort_keys=True))


@cache
def _problems(text: str) -> tuple[str, ...]:
    # By content: most objects are in many builds.
    return tuple(_found(json.loads(text)))


def _found(item: Object) -> Iterator[str]:
    if not custom(item.get("apiVersion", "")):
        yield from _own(item)
        return
    metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": item.get("metadata", {})}
    yield from _own(metadata)
    yield from _foreign(item)
    if item.get("kind") == "LeaderWorkerSet":
        yield from _templates(item)


def custom(api_version: str) -> bool:
    """Whether the kind is none of Kubernetes' own."""
    group, slash, _ = api_version.rpartition("/")
    own = group in GROUPS or (group.endswith(".k8s.io") and group not in FOREIGN)
    return bool(slash) and not own


def _templates(item: Object) -> Iterator[str]:
    for pod in pods_of(item):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        for found in _own(whole):
            yield f"{pod.owner}: {found}"


def _own(item: Object) -> Iterator[str]:
    try:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"no such kind: {error}"
    except kubernetes_validate.ValidationError as error:
        yield _text(error)


def _foreign(item: Object) -> Iterator[str]:
    kind = str(item.get("kind"))
    schema = _schema(kind)
    if schema is None:
        yield f"no schema (k8s/schemas/{kind.lower()}.json)"
        return
    validator = jsonschema.Draft202012Validator(schema)
    for error in validator.iter_errors(item):
        yield _text(error)


@cache
def _schema(kind: str) -> Any:
    path = K8S / "schemas" / f"{kind.lower()}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _text(error: Any) -> str:
    path = ".".join(str(part) for part in error.path)
    return f"{path or '(whole object)'}: {error.message}"
