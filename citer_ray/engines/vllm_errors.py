"""vLLM's errors in the project's terms: what the request got wrong, and what another engine could still do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from citer_ray.errors import RetryableError


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn vLLM's errors into ours.

    Raises:
        ValueError: vLLM refuses the request.
        RetryableError: the engine's process died, or the request failed inside it.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error
    except EngineDeadError as error:
        raise RetryableError("vLLM's engine process died; start the engine again") from error
    except EngineGenerateError as error:
        reason = error.__cause__ or error
        raise RetryableError(f"the request failed inside vLLM: {reason!r}") from error
