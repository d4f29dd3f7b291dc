"""What all configuration has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Frozen(BaseModel):
    """Base of all configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
