"""The figures that have a bar, by the names under which they are written."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """What a figure shall reach: at least `least`, or at most `most`."""

    what: str
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        """Whether the value reaches it."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


FRONTS = {
    "tokens_vs_grpc_128": Bar("tokens/s at 128 streams ÷ vLLM's Python gRPC server", least=1.3),
    "tokens_vs_http_128": Bar("tokens/s at 128 streams ÷ vLLM's HTTP server", least=1.4),
    "tokens_vs_asyncllm_128": Bar("tokens/s at 128 streams ÷ AsyncLLM alone", least=1.0),
    "tokens_vs_rust_128": Bar("tokens/s at 128 streams ÷ vLLM's Rust gRPC front", least=1.0),
    "ttft_vs_rust_128": Bar("median time to first token at 128 streams ÷ the Rust front", most=1.0),
    "ttft_vs_grpc_128": Bar("the same ÷ vLLM's Python gRPC server", most=0.75),
    "single_vs_grpc": Bar("one stream: tokens/s ÷ vLLM's Python gRPC server", least=1.0),
}
FAKES = {
    "cpu_vs_bare_256": Bar(
        "server CPU per message, 256 streams ÷ a bare grpc.aio stream", most=1.3
    ),
    "cpu_us_per_token_merged_256": Bar("server CPU per token, merge window of 60 ms, µs", most=10),
    "hop_ms_p50": Bar("added latency of one hop, idle, median, ms", most=0.5),
    "hop_ms_p99": Bar("added latency of one hop, idle, p99, ms", most=2),
    "idle_cpu_percent": Bar("idle server CPU, percent of a core", most=0.5),
    "cancel_ms_p99": Bar("cancel to free, p99, 256 streams, ms", most=50),
}
VOICE = {
    "voice_throughput_vs_direct": Bar("speech per second, 8 at once ÷ direct calls", least=0.9),
    "voice_ttfa_vs_direct": Bar("median time to first audio, 8 at once ÷ direct calls", most=1.1),
}
BARS = FRONTS | FAKES | VOICE
