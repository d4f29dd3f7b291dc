"""Validates the Kubernetes manifests against the API's schemas, strictly and without a cluster.

Kinds of others (custom resources) are checked against `k8s/schemas/<kind>.json`, small JSON schemas
of the fields that we use. Kustomizations and the patches they name are fragments, not objects:
they are left to `kubectl kustomize`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path("k8s")
KUSTOMIZATION = "kustomization.yaml"


def patches() -> set[Path]:
    """The files that some kustomization applies as patches."""
    found: set[Path] = set()
    for kustomization in ROOT.rglob(KUSTOMIZATION):
        document = yaml.safe_load(kustomization.read_text()) or {}
        for patch in document.get("patches", []):
            if "path" in patch:
                found.add((kustomization.parent / patch["path"]).resolve())
    return found


def custom(api_version: str) -> bool:
    group, _, version = api_version.rpartition("/")
    return bool(version) and "." in group and not group.endswith(".k8s.io")


def problem(document: dict[str, Any]) -> str | None:
    """Says what is wrong with one object, or None."""
    kind = document.get("kind", "")
    try:
        if custom(document.get("apiVersion", "")):
            schema = ROOT / "schemas" / f"{kind.lower()}.json"
            if not schema.exists():
                return f"{kind}: no schema ({schema})"
            jsonschema.validate(document, json.loads(schema.read_text()))
        else:
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(document, version, strict=True)
    except (
        jsonschema.ValidationError,
        kubernetes_validate.SchemaNotFoundError,
        kubernetes_validate.ValidationError,
    ) as error:
        path = ".".join(str(part) for part in getattr(error, "path", ()))
        return f"{kind} {path}: {getattr(error, 'message', error)}"
    return None


def problems() -> Iterator[str]:
    skipped = patches()
    for path in sorted(ROOT.rglob("*.yaml")):
        if path.name == KUSTOMIZATION or path.resolve() in skipped:
            continue
        for document in yaml.safe_load_all(path.read_text()):
            if document and (found := problem(document)):
                yield f"{path}: {found}"


def main() -> int:
    found = list(problems())
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
