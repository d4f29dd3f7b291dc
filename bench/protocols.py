"""How a load generator speaks to each front: one small adapter per protocol, all else is shared.

An adapter opens one connection to a target, and streams the answer to a prompt as pieces."""

from __future__ import annotations

import itertools
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from bench.foreign import RUST, RUST_METHOD, SERVICER, SERVICER_METHOD


class Piece(NamedTuple):
    """What one message brought. `tokens` 0: the front tells them later, all at once."""

    tokens: int
    text: str


class Adapter(ABC):
    """One connection to a front."""

    @abstractmethod
    async def open(self, target: str) -> None:
        """Connects. `target` is an address, or what the adapter needs instead of one."""

    @abstractmethod
    def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        """The answer to `prompt`: exactly `tokens` tokens, greedy, whatever they are."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnects."""


class GrpcAdapter(Adapter):
    """What the gRPC protocols share."""

    async def open(self, target: str) -> None:
        # Servers take half a minute to listen: try again soon, not after twice as long each time.
        options = [
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.initial_reconnect_backoff_ms", 500),
        ]
        self.channel = grpc.aio.insecure_channel(target, options)
        self._ids = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count())

    async def close(self) -> None:
        await self.channel.close()

    def next_id(self) -> str:
        """A request id that no other process uses."""
        return next(self._ids)


class Omni(GrpcAdapter):
    """Ours."""

    async def open(self, target: str) -> None:
        from omni_grpc.v1 import service_pb2, service_pb2_grpc

        await super().open(target)
        self._stub = service_pb2_grpc.OmniServiceStub(self.channel)
        self._request = service_pb2.AddRequestRequest

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        request = self._request(request_id=self.next_id())
        request.prompt.text = prompt
        params = request.stage_params.add(stage="llm")
        params.sampling.temperature = 0.0
        params.sampling.max_tokens = tokens
        params.sampling.ignore_eos = True
        async for response in self._stub.AddRequest(request):
            if response.HasField("output"):
                text = response.output.text
                yield Piece(len(text.token_ids), text.text)


class Scripted(GrpcAdapter):
    """Ours with fake stages, or the bare server. A prompt is a request as JSON, and says how many
    tokens come; pictures and sound count as none."""

    async def open(self, target: str) -> None:
        from omni_grpc.v1 import service_pb2, service_pb2_grpc

        await super().open(target)
        self._stub = service_pb2_grpc.OmniServiceStub(self.channel)
        self._request = service_pb2.AddRequestRequest

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        request = self._request(request_id=self.next_id(), **json.loads(prompt))
        async for response in self._stub.AddRequest(request):
            if response.HasField("output"):
                text = response.output.text
                yield Piece(len(text.token_ids), text.text)


class Servicer(GrpcAdapter):
    """vLLM's Python gRPC server. It gives token ids and no text: it leaves that to a gateway."""

    async def open(self, target: str) -> None:
        await super().open(target)
        self._call = self.channel.unary_stream(
            SERVICER_METHOD,
            request_serializer=SERVICER["GenerateRequest"].SerializeToString,
            response_deserializer=SERVICER["GenerateResponse"].FromString,
        )

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        sampling = {
            "temperature": 0.0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "n": 1,
        }
        request: Any = SERVICER["GenerateRequest"](
            request_id=self.next_id(), text=prompt, stream=True, sampling_params=sampling
        )
        async for response in self._call(request):
            if response.HasField("chunk"):
                yield Piece(len(response.chunk.token_ids), "")


class Rust(GrpcAdapter):
    """vLLM's Rust front, gRPC."""

    async def open(self, target: str) -> None:
        await super().open(target)
        self._call = self.channel.unary_stream(
            RUST_METHOD,
            request_serializer=RUST["GenerateRequest"].SerializeToString,
            response_deserializer=RUST["GenerateResponse"].FromString,
        )

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        request: Any = RUST["GenerateRequest"](
            request_id=self.next_id(),
            text=prompt,
            temperature=0.0,
            stopping={"max_new_tokens": tokens, "ignore_eos": True},
            response={"output_text": True, "output_token_ids": True},
        )
        async for response in self._call(request):
            if response.HasField("outputs"):
                yield Piece(len(response.outputs.token_ids), response.outputs.text)


class Http(Adapter):
    """OpenAI's completions, streamed. The usage at the end tells the tokens."""

    async def open(self, target: str) -> None:
        import aiohttp

        self._url = f"http://{target}/v1/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        body = {
            "model": "bench",
            "prompt": prompt,
            "temperature": 0.0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage")
                if chunk["choices"]:
                    yield Piece(0, chunk["choices"][0]["text"])
                elif usage:
                    yield Piece(usage["completion_tokens"], "")

    async def close(self) -> None:
        await self._session.close()


class InProcess(Adapter):
    """`AsyncLLM` without a network, in the load generator's own process. `target` is its engine
    arguments as JSON."""

    async def open(self, target: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**json.loads(target)))
        self._ids = itertools.count()

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Piece]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._engine.generate(prompt, params, str(next(self._ids))):
            for completion in output.outputs:
                yield Piece(len(completion.token_ids), completion.text)

    async def close(self) -> None:
        self._engine.shutdown()


PROTOCOLS: dict[str, type[Adapter]] = {
    "omni": Omni,
    "scripted": Scripted,
    "servicer": Servicer,
    "rust": Rust,
    "http": Http,
    "asyncllm": InProcess,
}
