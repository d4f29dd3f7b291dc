"""Whether vLLM's engine core, a process of its own, is still there and still turns.

The replica's own heartbeat says nothing of it: an idle engine that died, or one that hangs, would
show with the next request only, or never."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

log = logging.getLogger("omni_grpc.replica")

INTERVAL_S = 5.0
"""Between two questions. They are answered between steps of the engine."""


class Pulse:
    """Asks the engine core again and again. Make it on the event loop; `close` it before the
    engine."""

    def __init__(self, engine: AsyncLLM, silence_timeout: float) -> None:
        self.stopped = False
        """Whether the engine core died, or left a question unanswered for `silence_timeout`
        seconds."""
        self._engine = engine
        self._timeout = silence_timeout
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(min(INTERVAL_S, self._timeout / 4))
            try:
                async with asyncio.timeout(self._timeout):
                    await self._engine.is_sleeping()
            except TimeoutError:
                log.error("the engine core gave no answer for %g s", self._timeout)
                self.stopped = True
                return
            except EngineDeadError:
                log.error("the engine core died")
                self.stopped = True
                return

    async def close(self) -> None:
        """Asks no more."""
        self._asking.cancel()
        with suppress(asyncio.CancelledError):
            await self._asking
