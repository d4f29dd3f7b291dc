"""What our sessions need of vLLM's workers. Runs in their processes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingType


class SessionWorker:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any

    def follow_session_seeds(self) -> None:
        """Makes each segment of a session draw with its own seed. vLLM 0.32 takes all of a
        segment's parameters over but this one: a session keeps the generator that its first segment
        began with (`GPUModelRunner._update_streaming_request`)."""
        runner = self.model_runner
        update = getattr(runner, "_update_streaming_request", None)
        if update is None:
            # vLLM's second model runner (`VLLM_USE_V2_MODEL_RUNNER`) takes a segment as a request
            # of its own, seed included.
            return

        def update_and_seed(req_id: str, new_req_data: Any) -> Any:
            state, params = update(req_id, new_req_data), new_req_data.sampling_params
            state.generator = None
            if params is not None and params.sampling_type is SamplingType.RANDOM_SEED:
                state.generator = torch.Generator(device=runner.device)
                state.generator.manual_seed(params.seed)
            return state

        runner._update_streaming_request = update_and_seed
