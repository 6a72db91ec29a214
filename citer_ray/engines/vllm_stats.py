"""What vLLM reports of its passes, through its public stat loggers: memory in use, preemptions, tokens computed.

One `EngineWatch` a `VLLMEngine`; the engine's properties read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EngineWatch:
    """Numbers of the engine so far.

    Attributes:
        usage: part of the KV blocks that requests held at the last pass.
        num_preemptions: requests that gave their blocks up to others while they ran, and were computed again.
        num_passes: forward passes, where vLLM tells (its argument `enable_logging_iteration_details`).
        num_drafted: tokens that speculation proposed.
        num_accepted: those of them that stood.
        num_prefilled: tokens of prompts and of turns' new ids that these passes computed.
    """

    def __init__(self) -> None:
        self.usage = 0.0
        self.num_preemptions = self.num_passes = self.num_prefilled = 0
        self.num_drafted = self.num_accepted = 0

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> Any:
        """A vLLM stat logger that reports here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        watch = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                watch.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take in what vLLM says of one pass; either may be None."""
        if iteration_stats is not None:
            self.num_preemptions += int(iteration_stats.num_preempted_reqs)
        if scheduler_stats is None:
            return
        self.usage = float(scheduler_stats.kv_cache_usage)
        speculation = scheduler_stats.spec_decoding_stats
        if speculation is not None:
            self.num_drafted += int(speculation.num_draft_tokens)
            self.num_accepted += int(speculation.num_accepted_tokens)
        details = scheduler_stats.iteration_details
        if details is not None and not details.is_dummy:
            self.num_passes += 1
            self.num_prefilled += int(details.num_ctx_tokens)
