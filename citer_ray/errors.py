"""The errors that citer_ray raises on purpose.

Every message says what is wrong, where, and what to do. The command line turns a `CiterError` into one line on
stderr and exit status 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class CiterError(Exception):
    """Base class of all errors that a user can do something about."""


class ConfigError(CiterError, ValueError):
    """A configuration value is missing, unknown, out of range, or contradicts another one."""


class DataError(CiterError, ValueError):
    """An input row, file, or artifact cannot be used."""


class PairError(CiterError, ValueError):
    """The SLM, the LLM, their tokenizers, or a router do not belong together."""


class RetryableError(CiterError):
    """Infrastructure failed (a replica died, a server is away); the same call may succeed elsewhere or later."""
