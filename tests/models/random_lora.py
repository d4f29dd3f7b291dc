"""Makes a LoRA adapter of random weights for a model, in the format of PEFT.

    python -m tests.models.random_lora MODEL FOLDER

It changes what the model says, beyond doubt and without sense. Takes a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RANK = 4
MODULES = ("q_proj", "v_proj")


def build_in_child(model: Path, folder: Path) -> None:
    """As `build`, in a process of its own: torch stays out of this one."""
    command = [sys.executable, "-m", "tests.models.random_lora", str(model), str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)


def build(model: Path, folder: Path) -> None:
    """Writes the adapter into the folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    rows = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    spread = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=spread)
            weights[f"{place}.lora_B.weight"] = torch.randn(rows[module], RANK, generator=spread)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
