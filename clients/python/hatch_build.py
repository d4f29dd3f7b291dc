"""Adds the generated stubs, `omni_grpc/v1`, to what is built, so that the client installs without
the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface[Any]):
    """Finds the stubs at the repository's root or, in an unpacked sdist, beside this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Names the folder to include."""
        if version == "editable":
            # Works inside the repository, where the server's package has them: a copy would go
            # stale.
            return
        here = Path(self.root)
        places = (here / "omni_grpc" / "v1", here.parent.parent / "omni_grpc" / "v1")
        stubs = next((place for place in places if place.is_dir()), None)
        if stubs is None:
            raise FileNotFoundError(f"no generated stubs in any of {[str(p) for p in places]}")
        build_data["force_include"][str(stubs)] = "omni_grpc/v1"
