"""How full vLLM's KV cache is, through its public stat loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvCacheWatch:
    """Remembers the KV cache's usage at the engine's last pass."""

    def __init__(self) -> None:
        self.usage = 0.0

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> Any:
        """A vLLM stat logger that reports here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        watch = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None:
                    watch.usage = float(scheduler_stats.kv_cache_usage)

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)
