"""Removing secrets from what is written down: credentials in URLs, and values of keys that are named like secrets.

Read by everything that writes for others to see: `run.yaml`, `provenance.json` (argv), MLflow's params, messages and
logs. Secrets belong into the environment; this catches those that were typed into a URL or a command line anyway.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

# `user:password@` after a scheme. The second form is an object store's secret key, which may hold slashes; digits
# before the first slash are a port, not a password.
_AUTHORITY = re.compile(r"(?<=://)(?:[^/?#\s\"'<>]+|[^/?#\s\"'<>:@]+:(?!\d+/)[^?#\s\"'<>@]+)@")
_NAME = (
    r"(?:[\w.-]*[-_.])?(?:pass|passwd|password|passphrase|secret|token|api[-_]?keys?|secret[-_]?(?:access[-_]?)?key"
    r"|credentials?|sig|signature)"
)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s&;,\"']+)"
_ASSIGNMENT = re.compile(rf"(?i)(?<![\w.-])(-{{0,2}}{_NAME}\s*=\s*){_VALUE}")
_PARAMETER = re.compile(rf"(?i)(?<=[?&])({_NAME}=)[^\s&\"'<>]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_OPTION = re.compile(rf"(?i)--{_NAME}")
_HARMLESS = frozenset({"handoff_token", "pair.handoff_token"})  # named like secrets, and none


def without_credentials(text: str) -> str:
    """`text` with `user:password@`, and query parameters named like secrets, masked in every URL in it."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _AUTHORITY.sub(f"{MASK}@", text))


def redact(text: str) -> str:
    """`text` without credentials in URLs, values of secret names (`password=...`) and bearer tokens."""
    text = _ASSIGNMENT.sub(_masked, without_credentials(text))
    return _BEARER.sub(rf"\g<1>{MASK}", text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The arguments of a command line, redacted; also the argument after one such as `--password`."""
    redacted: list[str] = []
    hide_next = False
    for argument in argv:
        redacted.append(MASK if hide_next else redact(argument))
        hide_next = _OPTION.fullmatch(argument) is not None
    return redacted


def redact_values(values: Any) -> Any:
    """Nested mappings and lists with the URLs in every string masked; everything else stays as it is."""
    if isinstance(values, Mapping):
        return {key: redact_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value) for value in values]
    return without_credentials(values) if isinstance(values, str) else values


class RedactingFilter(logging.Filter):
    """Redacts the message of every record that passes; for handlers, so that records of all loggers pass it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record in place and let it pass."""
        message = record.getMessage()
        redacted = redact(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        return True


def _masked(match: re.Match[str]) -> str:
    name = match[1].rstrip("= \t").lstrip("-")
    return match[0] if name.lower() in _HARMLESS else f"{match[1]}{MASK}"
