"""What a `VLLMEngine` tells the code that it plugs into vLLM's processes, and the names it uses for that.

`ModelSettings` travels inside the model's config (`hf_overrides`), which vLLM sends to every process; the
routed model and the logits processors read it there. Per-request values travel in
`SamplingParams.extra_args`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIG_KEY = "citer_ray"  # attribute of the model's config
THRESHOLD_KEY = "citer_threshold"  # extra_args: hand off below this score
RANDOM_KEY = "citer_random"  # extra_args: `RandomRouting` as a dict
SAMPLING_KEY = "citer_sampling"  # extra_args: `SeededSampling` as a dict
PROMPT_LENGTH_KEY = "citer_prompt_length"  # extra_kwargs of a pooling request: where the response begins


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Constants of one engine.

    Attributes:
        shared_vocab_size: ids at or above it are never written.
        masked_ids: further ids that are never written (the handoff token among them).
        handoff_token_id: the reserved column, or None where nothing is handed off.
        router: folder of the router's artifact, or None.
    """

    shared_vocab_size: int
    masked_ids: tuple[int, ...] = ()
    handoff_token_id: int | None = None
    router: str | None = None

    def to_config(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "masked_ids": list(self.masked_ids)}

    @classmethod
    def from_config(cls, hf_config: object) -> ModelSettings | None:
        """What `to_config` wrote into a model's config, or None if this engine is not ours."""
        values = getattr(hf_config, CONFIG_KEY, None)
        if values is None:
            return None
        return cls(**{**values, "masked_ids": tuple(values["masked_ids"])})


@dataclass(frozen=True, slots=True)
class SeededSampling:
    """Sampling that is a function of (seed, position); see `vllm_sampling.py`.

    Attributes:
        temperature: 0 takes the largest logit, which penalties may have changed.
        top_p: nucleus mass.
        top_k: candidates kept; 0 keeps all.
        seed: of the noise.
        position: absolute position of the turn's first new token.
        presence_penalty, frequency_penalty: as in `engine.Sampling`.
        response_ids: the response before the turn, where there are penalties.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    response_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RandomRouting:
    """Scores that need no model: the baseline `random:SEED`; see `scorers.random_scores`.

    Attributes:
        seed: of the policy.
        key: identifies the response.
        position: absolute position of the turn's first new token.
    """

    seed: int
    key: int
    position: int


def unwritable_ids(settings: ModelSettings) -> Sequence[int]:
    """Masked ids inside the shared range."""
    return [token for token in settings.masked_ids if token < settings.shared_vocab_size]
