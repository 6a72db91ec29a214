"""Which pair an artifact belongs to.

A fingerprint is an opaque string for each of the SLM, the LLM and their tokenizer. The pair computes them;
the label store and the router keep them, and refuse to work with another pair.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PairFingerprint(BaseModel):
    """Fingerprints of the models and the tokenizer that labels or a router were made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slm: str = Field(min_length=1, description="Fingerprint of the SLM, whose hidden states the router reads.")
    llm: str = Field(min_length=1, description="Fingerprint of the LLM.")
    tokenizer: str = Field(min_length=1, description="Fingerprint of the shared tokenizer.")
