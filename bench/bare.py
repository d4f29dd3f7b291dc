"""The floor: a bare `grpc.aio` server whose streams give messages equal to ours, one per token.

    python -m bench.bare PORT

It makes no decision, keeps no queue and knows no model. Each stream's script is read from the same
request that a fake stage gets."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvloop

from omni_grpc.v1 import service_pb2, service_pb2_grpc


class Bare(service_pb2_grpc.OmniServiceServicer):
    """One handler."""

    async def AddRequest(self, request: service_pb2.AddRequestRequest, context: Any) -> None:
        """`outputs` words, one each `interval_ms`."""
        script = request.stage_params[0].custom.fields
        pause, loop = script["interval_ms"].number_value / 1e3, asyncio.get_running_loop()
        due = loop.time()
        for seq in range(int(script["outputs"].number_value)):
            response = service_pb2.AddRequestResponse(seq=seq)
            output = response.output
            output.stage = "text"
            output.text.text = f"word{seq} "
            output.text.token_ids.append(seq % 1000)
            await context.write(response)
            due += pause
            await asyncio.sleep(due - loop.time())


async def _main(port: int) -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_OmniServiceServicer_to_server(Bare(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(f"Serving on {port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))
