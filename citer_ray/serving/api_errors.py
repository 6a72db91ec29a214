"""Errors that clients see: OpenAI's error object, its HTTP status, and where there is one `Retry-After`.

Raised anywhere in `serving/`; `app.py` turns them into responses, or into the last event of a stream that has begun.
"""

from __future__ import annotations

import math
from typing import Any

from citer_ray.errors import CiterError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(CiterError):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the request's field, if one is to blame.
        code: a short name for programs.
        retry_after_s: seconds after which the client may try again; None says nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> Any:
        keywords = {name: getattr(self, name) for name in ("status", "param", "code", "retry_after_s")}
        return _rebuild, (self.message, keywords)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _rebuild(message: str, keywords: dict[str, Any]) -> ApiError:
    return ApiError(message, **keywords)


def overloaded(message: str, *, status: int = 503, retry_after_s: float = 1.0) -> ApiError:
    """Too much to do at the moment, or a part is missing; the client may come back."""
    return ApiError(message, status=status, code="overloaded", retry_after_s=retry_after_s)
