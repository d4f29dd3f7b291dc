"""What vLLM's scheduler tells of its load, with each of its steps."""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from omni_grpc.stages.vllm.shortcut import ShortCut
from omni_grpc.types import StageStatistics


class EngineLoad(AggregateStatLoggerBase):  # type: ignore[misc]
    """Keeps the newest figures of each engine core (there are several with data parallelism).

    vLLM gathers them only where somebody wants them. That costs, per step of the engine, some ten
    microseconds in the engine core and half a kilobyte on the way; nothing per token."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._told: dict[int, Any] = {}

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """One step's figures; a message without any brings None."""
        if scheduler_stats is not None:
            self._told[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def statistics(self, engine: AsyncLLM, counters: dict[str, int]) -> StageStatistics:
        """The present load. The work that is left is the server's to count: it sees every token
        that leaves."""
        if not engine.output_processor.has_unfinished_requests():
            # What was aborted is gone without another step to tell so.
            return StageStatistics(0, kv_cache_use=0.0, counters=counters)
        told = self._told.values()
        if not told:
            return StageStatistics(counters=counters)
        return StageStatistics(
            sum(one.num_waiting_reqs + one.num_skipped_waiting_reqs for one in told),
            kv_cache_use=max(one.kv_cache_usage for one in told),
            counters=counters,
        )


class WatchedEngine(AsyncLLM):  # type: ignore[misc]
    """AsyncLLM whose scheduler tells its load. The rest of what `log_stats` turns on is left out:
    accounts per request that cost 5 to 20 µs for each token (an environment variable is looked up
    each time), and a logger for Prometheus that nobody would read."""

    load: EngineLoad
    short_cut: ShortCut

    @classmethod
    def make(cls, arguments: AsyncEngineArgs) -> WatchedEngine:
        """An engine of these arguments, which say `disable_log_stats`."""
        engine: WatchedEngine = cls.from_engine_args(arguments, stat_loggers=[EngineLoad])
        manager = engine.logger_manager
        engine.short_cut = ShortCut(engine.output_processor)
        engine.load = next(one for one in manager.stat_loggers if isinstance(one, EngineLoad))
        manager.stat_loggers = [engine.load]
        return engine

    def _run_output_handler(self) -> None:
        # The scheduler, which is made by now, goes on telling. Spans of vLLM's own are made of the
        # accounts.
        if self.observability_config.otlp_traces_endpoint is None:
            self.log_stats = False
        super()._run_output_handler()
