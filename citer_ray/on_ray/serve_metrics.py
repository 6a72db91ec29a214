"""Prometheus metrics through Ray's metrics API; Ray exports them from every node with the prefix `ray_`.

The names are listed in docs/serving.md, and a dashboard reads them. Labels are few and known: model, router version,
writer, role.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from citer_ray.policy import Writer
from citer_ray.serving.metrics import Metrics

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
_SHARES = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0]
_SCORES = [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999, 1.0]


class IngressMetrics(Metrics):
    """Counts of one replica of the ingress."""

    def __init__(self) -> None:
        super().__init__()
        self._responses = Gauge("citer_responses_in_flight", "Responses in progress in the ingress.")
        self._requests = Counter("citer_requests", "Requests answered.", ("model", "router", "status"))
        self._seconds = Histogram("citer_request_seconds", "Seconds of a request.", _SECONDS, ("model",))
        self._first = Histogram("citer_first_token_seconds", "Seconds to the first token.", _SECONDS, ("model",))
        self._gap = Histogram("citer_inter_token_seconds", "Seconds between tokens.", _SECONDS, ("model",))
        self._tokens = Counter("citer_tokens", "Tokens by the model that wrote them.", ("model", "router", "writer"))
        self._scores = Histogram("citer_p_slm", "Values of p_slm.", _SCORES, ("router",))
        self._share = Histogram("citer_llm_share", "LLM share of a response.", _SHARES, ("router",))
        self._visits = Counter("citer_visits", "Visits of the LLM.", ("router",))
        self._saved = Counter("citer_gigabytes_saved", "Gigabytes not moved, against the LLM alone.", ("router",))
        self._rebuilds = Counter("citer_session_rebuilds", "Sessions rebuilt on another replica.", ("role",))
        self._degraded = Counter("citer_degraded_responses", "Responses that went on without the LLM.", ("router",))
        self._cancelled = Counter("citer_cancelled_requests", "Requests whose client went away.", ("model",))

    def in_flight(self, change: int) -> None:
        super().in_flight(change)
        self._responses.set(self.num_responses)

    def request(self, model: str, router: str, status: int, seconds: float) -> None:
        self._requests.inc(1, {"model": model, "router": router, "status": str(status)})
        if status == 200:
            self._seconds.observe(max(seconds, 1e-9), {"model": model})

    def first_token(self, model: str, seconds: float) -> None:
        self._first.observe(max(seconds, 1e-9), {"model": model})

    def tokens(self, model: str, router: str, writer: Writer, count: int, seconds: float) -> None:
        self._tokens.inc(count, {"model": model, "router": router, "writer": writer.value})
        self._gap.observe(max(seconds / count, 1e-9), {"model": model})

    def scores(self, router: str, values: Sequence[float]) -> None:
        for value in values:
            self._scores.observe(value, {"router": router})

    def response(self, model: str, router: str, llm_share: float, visits: int, gigabytes_saved: float) -> None:
        if model == "routed":
            self._share.observe(llm_share, {"router": router})
            if visits:
                self._visits.inc(visits, {"router": router})
            if gigabytes_saved > 0:
                self._saved.inc(gigabytes_saved, {"router": router})

    def rebuilds(self, role: str, count: int) -> None:
        self._rebuilds.inc(count, {"role": role})

    def degraded(self, router: str) -> None:
        self._degraded.inc(1, {"router": router})

    def cancelled(self, model: str) -> None:
        self._cancelled.inc(1, {"model": model})


class ModelMetrics:
    """Counts of one replica of the SLM or the LLM."""

    def __init__(self, role: str) -> None:
        self._tags = {"role": role}
        self._jobs = Gauge("citer_model_responses", "Responses in progress in a model's replica.", ("role",))
        self._sessions = Gauge("citer_open_sessions", "Sessions that hold a KV cache.", ("role",))
        self._turn = Histogram(
            "citer_turn_seconds", "Seconds of a turn of the LLM, in its replica.", _SECONDS, ("role",)
        )
        self._visit = Histogram("citer_visit_seconds", "Seconds of a visit, seen from the SLM.", _SECONDS, ("role",))
        self._direct = Counter("citer_direct_visits", "Visits that came on lanes, past Serve's router.", ("role",))
        self._written = Counter("citer_visit_tokens", "Tokens written in visits.", ("role",))

    def jobs(self, count: int) -> None:
        """Responses in progress."""
        self._jobs.set(count, self._tags)

    def sessions(self, count: int) -> None:
        """Open sessions."""
        self._sessions.set(count, self._tags)

    def turn(self, seconds: float, tokens: int) -> None:
        """A visit, in the LLM's replica."""
        self._turn.observe(max(seconds, 1e-9), self._tags)
        self._written.inc(max(tokens, 1), self._tags)

    def direct_visit(self) -> None:
        """A visit that came on a lane, in the LLM's replica."""
        self._direct.inc(1, self._tags)

    def visit(self, seconds: float) -> None:
        """A visit, with the way to the LLM and back."""
        self._visit.observe(max(seconds, 1e-9), self._tags)
