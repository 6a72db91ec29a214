"""The configuration section `engine.remote`: an LLM that runs elsewhere, behind an OpenAI-compatible server.

Read by `engines/build.py` and `engines/remote*.py`. The key is named by an environment variable and never part of a
configuration, so that `run.yaml` can be shown to anybody.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from citer_ray.config_section import Positive, Seconds, Section


class RemoteConfig(Section):
    """The LLM on another server, whatever `kind` runs the SLM."""

    url: str | None = Field(
        None,
        description="Base URL of a server whose `/v1/completions` takes and returns token ids (vLLM's does), such as "
        "`http://host:8000/v1`; null runs the LLM here.",
    )
    model: str | None = Field(None, description="The model's name on the server; null takes the only one there.")
    api_key_env: str = Field("CITER_LLM_API_KEY", description="Environment variable that holds the server's key.")
    timeout_s: Seconds = Field(60.0, description="Seconds that one call may take.")
    max_attempts: Positive = Field(4, description="Calls until the server counts as away.")
    backoff_s: float = Field(
        0.5, ge=0, description="Seconds before the second attempt; doubles with each, unless the server names a time."
    )

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must look like http://host:8000/v1, got {parts.scheme or url[:40]!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("url must not hold credentials; put the key into the variable that api_key_env names")
        return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
