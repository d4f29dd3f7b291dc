"""A small language model with random weights: its tokens' way is measured, not their sense.

Its vocabulary is its tokenizer's size, since some detokenizers fail at ids that no token has."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from omni_grpc import embedded

TOKENIZER = "embedded:smollm2-135m-instruct"
SEED = 0
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    # So large that the most likely token changes from step to step.
    "initializer_range": 0.2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def prepare(cache: Path) -> Path:
    """The model's folder, built if it is not there; blocks for seconds. Its name changes with the
    recipe."""
    folder = cache / f"random-llama-{CONFIG['hidden_size']}x{CONFIG['num_hidden_layers']}-{SEED}"
    if folder.is_dir():
        return folder
    embedded.prepare([TOKENIZER], lambda line: print(line, file=sys.stderr))
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        # In a child: this process holds no torch.
        subprocess.run([sys.executable, "-m", "bench.model", str(scratch)], check=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def build(folder: Path) -> None:
    """Writes configuration, weights (bfloat16) and tokenizer into `folder`."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = embedded.resolve(TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **CONFIG,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder)
    # Fronts that read a model's own sampling defaults find none: all of them sample alike.
    (folder / "generation_config.json").write_text(json.dumps({}))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
