"""What differs between the versions of vLLM that this stage runs on (0.26 to 0.32)."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # before 0.30
    from vllm.exceptions import VLLMValidationError as VLLMClientError

__all__ = ["VLLMClientError", "process_for_engine"]


async def process_for_engine(renderer: Any, tokens: Any, params: Any) -> Any:
    """The engine's input of a tokenized prompt. Only later versions check it by the parameters that
    it was tokenized with."""
    process = renderer.process_for_engine_async
    if _takes_params(type(renderer)):  # type: ignore[arg-type]
        return await process(tokens, time.time(), tok_params=params)
    return await process(tokens, time.time())


@functools.cache
def _takes_params(renderer: type) -> bool:
    process: Any = renderer.process_for_engine_async  # type: ignore[attr-defined]
    return "tok_params" in inspect.signature(process).parameters
