"""Builds one embedded model into an empty folder: `build_model NAME SOURCE OUT`.

The server starts this as a child process, reads progress lines from its stdout and takes a non-zero
exit, with what stands on stderr, for a failure. A model without a source file gets `-`.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1


def say(line: str) -> None:
    print(line, flush=True)


def build_smollm2(source: Path, out: Path) -> None:
    """Turns the GGUF file into a Hugging Face folder: bfloat16 weights, tokenizer, template."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: nothing here may ask a hub
    os.environ["TQDM_DISABLE"] = "1"  # stderr is for what went wrong
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    started = time.monotonic()
    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    say(f"tokenizer read after {time.monotonic() - started:.1f} s")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
    )
    say(f"weights dequantized after {time.monotonic() - started:.1f} s")
    if not tokenizer.chat_template:
        raise ValueError(f"{name} carries no chat template")
    if model.config.vocab_size != len(tokenizer):
        raise ValueError(
            f"{name}: {model.config.vocab_size} embeddings for {len(tokenizer)} tokens"
        )
    # The GGUF knows no sampling defaults: only the ids that open, pad and end a turn are written.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def build_hibari(_source: Path, out: Path) -> None:
    """Cuts the speech model of the installed package into its acoustic and decoder stages."""
    from omni_grpc.stages.voice.build import build

    build(out)


BUILDERS: dict[str, Callable[[Path, Path], None]] = {
    "smollm2-135m-instruct": build_smollm2,
    "hibari": build_hibari,
}


def main(arguments: list[str]) -> int:
    # A server that dies while it waits must not leave a converter at work in a folder nobody owns.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    name, source, out = arguments
    BUILDERS[name](Path(source), Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
