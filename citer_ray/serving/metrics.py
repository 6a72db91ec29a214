"""What serving counts, as calls; the default does nothing, and `on_ray/serve_metrics.py` exports to Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from citer_ray.policy import Writer


class Metrics:
    """All calls of the ingress; `model` is `routed`, `slm` or `llm`, `router` a version or an empty string.

    Attributes:
        num_responses: in progress.
    """

    def __init__(self) -> None:
        self.num_responses = 0

    def in_flight(self, change: int) -> None:
        """A response began (+1) or ended (-1)."""
        self.num_responses += change

    def request(self, model: str, router: str, status: int, seconds: float) -> None:
        """A request was answered."""

    def first_token(self, model: str, seconds: float) -> None:
        """Time from the request to its first token."""

    def tokens(self, model: str, router: str, writer: Writer, count: int, seconds: float) -> None:
        """Tokens came, `seconds` after the ones before."""

    def scores(self, router: str, values: Sequence[float]) -> None:
        """Values of `p_slm`."""

    def response(self, model: str, router: str, llm_share: float, visits: int, gigabytes_saved: float) -> None:
        """A response is complete."""

    def rebuilds(self, role: str, count: int) -> None:
        """Sessions of a model were rebuilt on another replica."""

    def degraded(self, router: str) -> None:
        """A response goes on without the LLM."""

    def cancelled(self, model: str) -> None:
        """A client went away."""
