"""Routing against exact speculation: the LLM share below which routing moves fewer bytes.

Speculative decoding has the LLM's accuracy by construction, so the honest question to every router is whether it is
cheaper. Closed forms at batch 1 for a prompt of m tokens and a response of n, with weights W and cache bytes K a token:
routing at share s moves n W_S + K_S (m n + n^2/2) + s n W_L + s K_L (m n + n^2/2); speculation in
R = n (1 - a) / (1 - a^(d+1)) rounds of d drafted tokens (Leviathan et al., 2211.17192) moves
R (d (W_S + K_S c) + W_L + K_L (c + d)) with c = m + n/2. Fed by the cost model; read by the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from citer_ray.cost import PairCost


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A pair and a typical response.

    Attributes:
        cost: the pair, with the router if it shall count.
        prompt_tokens: m.
        new_tokens: n.
    """

    cost: PairCost
    prompt_tokens: float
    new_tokens: float

    @property
    def _context_sum(self) -> float:
        """Cached tokens that a model alone reads over the whole response."""
        return self.prompt_tokens * self.new_tokens + self.new_tokens**2 / 2

    def routing_bytes(self, llm_share: float) -> float:
        """Bytes of a response whose visits are spread evenly."""
        slm, llm, router = self.cost.slm, self.cost.llm, self.cost.router
        return (
            self.new_tokens * (slm.weight_bytes + (router.decision_bytes if router else 0.0))
            + slm.kv_bytes_per_token * self._context_sum
            + llm_share * (self.new_tokens * llm.weight_bytes + llm.kv_bytes_per_token * self._context_sum)
        )

    def speculation_bytes(self, acceptance: float, draft_length: int) -> float:
        """Bytes of a response by exact speculation, at an acceptance rate a token."""
        slm, llm = self.cost.slm, self.cost.llm
        context = self.prompt_tokens + self.new_tokens / 2
        drafts = draft_length * (slm.weight_bytes + slm.kv_bytes_per_token * context)
        check = llm.weight_bytes + llm.kv_bytes_per_token * (context + draft_length)
        return self.new_tokens / tokens_per_round(acceptance, draft_length) * (drafts + check)

    def share(self, acceptance: float, draft_length: int) -> float:
        """The LLM share at which both move the same bytes, in [0, 1]: below it, routing moves fewer."""
        alone = self.routing_bytes(0.0)
        whole = self.routing_bytes(1.0) - alone
        return min(1.0, max(0.0, (self.speculation_bytes(acceptance, draft_length) - alone) / whole))


def tokens_per_round(acceptance: float, draft_length: int) -> float:
    """Expected tokens of one pass of the LLM: (1 - a^(d+1)) / (1 - a)."""
    if not 0 <= acceptance <= 1 or draft_length < 1:
        raise ValueError(f"need an acceptance in [0, 1] and a draft length >= 1, got {acceptance}, {draft_length}")
    return float(sum(acceptance**power for power in range(draft_length + 1)))
