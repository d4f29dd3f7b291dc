"""What kustomize makes of our overlays, and of each component on the overlay below it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.manifests.pods import Pod, pods_of

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
NAMESPACE = "omni-grpc"
BASES = {"leaderworkerset": "multi-gpu"}
"""The overlay below a component, where it is not one-gpu."""

Object = dict[str, Any]


class BuildError(Exception):
    """kustomize refuses a folder; the message is its own."""


class NoKubectlError(BuildError):
    """There is no kubectl, and none can be had here."""


@dataclass(frozen=True, slots=True)
class Build:
    """The objects that one `kubectl apply -k` would bring."""

    name: str
    objects: Sequence[Object]

    def of(self, *kinds: str) -> list[Object]:
        """The objects of these kinds."""
        return [item for item in self.objects if item.get("kind") in kinds]

    def has(self, kind: str, name: str) -> bool:
        """Whether there is an object of that kind and name."""
        return any(item["metadata"]["name"] == name for item in self.of(kind))

    def pods(self) -> Iterator[Pod]:
        """The pod templates of all workloads."""
        for item in self.objects:
            yield from pods_of(item)


@cache
def kubectl() -> Path:
    """A kubectl that can build components. Raises NoKubectlError."""
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "scripts/cluster-tools"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise NoKubectlError(done.stderr.strip())
    return Path(done.stdout.strip())


def render(folder: Path) -> list[Object]:
    """The objects of a folder with a kustomization. Raises BuildError."""
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr.strip())
    return [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]


def compose(component: Path, root: Path = K8S) -> list[Object]:
    """The objects of a component on the overlay below it, as a user's own kustomization would have
    them."""
    overlay = root / "overlays" / BASES.get(component.name, "one-gpu")
    with tempfile.TemporaryDirectory(prefix="omni-k8s-") as name:
        # kustomize takes relative paths only.
        folder = Path(name).resolve()
        content: Mapping[str, object] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [os.path.relpath(overlay.resolve(), folder)],
            "components": [os.path.relpath(component.resolve(), folder)],
            "images": [{"name": "omni-grpc", "newTag": image_tag(overlay)}],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return render(folder)


def image_tag(overlay: Path) -> str:
    """The tag that an overlay gives our image."""
    content = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    (image,) = content["images"]
    return str(image["newTag"])


def builds(root: Path = K8S) -> Iterator[Build]:
    """Every overlay, and every component on one. Raises BuildError."""
    for folder in sorted((root / "overlays").iterdir()):
        yield Build(f"overlays/{folder.name}", render(folder))
    for folder in sorted((root / "components").iterdir()):
        yield Build(f"components/{folder.name}", compose(folder, root))
