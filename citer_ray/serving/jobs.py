"""What travels between the ingress and a model's replica: a job, and what is reported of it.

A job carries everything that its response needs, the tokens so far included; so any replica can go on with it. Plain
records of plain values: they are pickled for every response and every report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from citer_ray.engine import Finish, Sampling
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Policy, Threshold, Writer


@dataclass(frozen=True, slots=True)
class RouterRef:
    """A router in service.

    Attributes:
        version: its name in metrics and usage; one version never changes.
        source: folder or registry URI that replicas load it from.
    """

    version: str
    source: str


@dataclass(frozen=True, slots=True)
class Job:
    """One response to decode, from its beginning or from where another replica left it.

    Attributes:
        session: key of the response; its turns go to the replica that this key hashes to.
        attempt: how many replicas were tried before; each attempt goes to the next one.
        prompt_ids: the prompt.
        written_ids: tokens of the response so far.
        max_new_tokens: limit of the whole response.
        sampling: how tokens are picked.
        model: who writes: the routed pair, or one model alone.
        router: the router, for `routed`.
        threshold: its threshold.
        llm_tokens_per_visit: tokens of a visit.
        interval_s: reports come this often at most.
    """

    session: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    model: str
    router: RouterRef | None = None
    threshold: float = 0.0
    llm_tokens_per_visit: int = 1
    interval_s: float = 0.04
    attempt: int = 0
    written_ids: tuple[int, ...] = ()

    def policy(self) -> Policy:
        """Who writes next."""
        if self.model == "slm":
            return AlwaysSlm()
        if self.model == "llm":
            return AlwaysLlm()
        assert self.router is not None, "a routed job names its router"
        return Threshold(scorer_name(self.router.version), self.threshold, self.llm_tokens_per_visit)


def scorer_name(version: str) -> str:
    """Name of a router's scorer in the SLM's engine."""
    return f"router:{version}"


class Run(NamedTuple):
    """Tokens that one model wrote in one go; the lists have one entry each."""

    writer: Writer
    token_ids: list[int]
    scores: list[float | None]
    logprobs: list[float]


class Report(NamedTuple):
    """What happened since the last report; without runs it says that the replica is alive.

    Attributes:
        runs: new tokens, in order.
        finish: set in the last report.
        degraded: from here on the SLM writes what the router wants from the LLM.
        rebuilds: sessions of the LLM that were rebuilt.
    """

    runs: list[Run]
    finish: Finish | None = None
    degraded: bool = False
    rebuilds: int = 0
