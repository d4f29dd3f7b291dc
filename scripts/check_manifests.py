"""Validates what `kubectl apply -k` would bring, without a cluster: every overlay is built, and
every component on one; every object is held against the schema of its kind, and the whole against
the code (scripts/manifests).

usage: scripts/check_manifests.py [FOLDER]    k8s by default
"""

import sys
from collections.abc import Iterator
from pathlib import Path

# Run as a file, from the repository's root.
sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.manifests.build import K8S, Build, BuildError, builds
from scripts.manifests.group_rules import group_problems
from scripts.manifests.link_rules import link_problems
from scripts.manifests.pod_rules import pod_problems
from scripts.manifests.schemas import schema_problems


def problems(build: Build) -> Iterator[str]:
    """What is wrong with a build. Rules expect objects that fit their schemas."""
    found = False
    for item in build.objects:
        name = f"{item.get('kind')}/{item.get('metadata', {}).get('name')}"
        for problem in schema_problems(item):
            found = True
            yield f"{name}: {problem}"
    if not found:
        yield from pod_problems(build)
        yield from link_problems(build)
        yield from group_problems(build)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else K8S
    try:
        found = [f"{build.name}: {text}" for build in builds(root) for text in problems(build)]
    except BuildError as error:
        found = [str(error)]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
