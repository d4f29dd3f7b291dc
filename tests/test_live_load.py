"""A film's pace shows in the load: what its stage counts reaches clients."""

from __future__ import annotations

import asyncio

from omni_grpc.config import load_pipeline
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.support import ask, collect


async def test_get_load_tells_chunks_and_underruns(serve: Serve) -> None:
    served = await serve(load_pipeline("shapes-live"))
    film = [{"stage": "painter", "diffusion": {"frames": 8, "seed": 1}}]
    request = ask("a large red circle on a white background", stage_params=film)
    responses = await collect(served.stub, request)
    assert responses[-1].finished.usage.frames == 8
    async with asyncio.timeout(10):
        while True:
            load = await served.stub.GetLoad(service_pb2.GetLoadRequest())
            counters = dict(load.stages[0].replicas[0].counters)
            # Told by heartbeat, once a second.
            if counters.get("chunks") == 2:
                break
            await asyncio.sleep(0.1)
    assert "underruns" in counters
