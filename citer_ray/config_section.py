"""The base of configuration sections, and the field types that they share.

`config.py` and the modules that hold one large section each build on it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of all sections: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
