"""Wall time of a response from its passes: what one pass and one read token of each model take on this machine.

Responses of an evaluation are decoded many at once, so their own wall times say nothing. Some are decoded alone and
timed; `PassTimes.fit` finds the times of their parts by least squares, and `seconds` prices every response with them.
The report shows the fitted beside the measured times. Fed by rows of `evaluation.Decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from sklearn.linear_model import LinearRegression

# A pass over one token is part of `*_pass`; every further token that it reads costs `*_token`.
PARTS = ("slm_pass", "llm_pass", "slm_token", "llm_token", "decision")


class PassTimes(BaseModel):
    """Seconds of each part of a response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slm_pass: float = Field(ge=0, description="One pass of the SLM over one token, with all that goes with a step.")
    llm_pass: float = Field(ge=0, description="One pass of the LLM over one token.")
    slm_token: float = Field(ge=0, description="Each further token that a pass of the SLM reads.")
    llm_token: float = Field(ge=0, description="Each further token that a pass of the LLM reads.")
    decision: float = Field(ge=0, description="One decision of a router.")

    @classmethod
    def fit(cls, rows: Sequence[Mapping[str, Any]]) -> PassTimes:
        """Times of the parts from responses that were decoded alone; each row has its `seconds`.

        Raises:
            ValueError: no rows.
        """
        if not rows:
            raise ValueError("pass times need at least one timed response")
        columns = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0] if name in _COLUMNS}
        seconds = np.array([row["seconds"] for row in rows], np.float64)
        # Relative errors count, or the longest responses would decide alone.
        weights = 1 / np.maximum(seconds, 1e-9)
        model = LinearRegression(positive=True, fit_intercept=False).fit(_parts(columns), seconds, weights**2)
        return cls(**dict(zip(PARTS, model.coef_.tolist(), strict=True)))

    def seconds(self, columns: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        """Seconds of each response, [N]; `columns` are those of `evaluation.ROW_SCHEMA`."""
        prices = np.array([getattr(self, part) for part in PARTS])
        return np.asarray(_parts({name: np.asarray(columns[name], np.float64) for name in _COLUMNS}) @ prices)


_COLUMNS = ("slm_passes", "llm_passes", "slm_read", "llm_read", "decisions")


def _parts(columns: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """How often each part occurs, [N, parts]."""
    slm, llm = columns["slm_passes"], columns["llm_passes"]
    return np.stack([slm, llm, columns["slm_read"] - slm, columns["llm_read"] - llm, columns["decisions"]], axis=1)
