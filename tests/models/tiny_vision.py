"""Makes a tiny vision-language model: Idefics3's architecture, random weights, SmolLM2's tokenizer.

    python -m tests.models.tiny_vision FOLDER

It knows nothing, but a picture changes what it says, so what matters of a server can be tested:
that pictures arrive, in order, and under the right keys. Idefics3 because both vLLM's and the
processor's part of it work without torchvision, whose PyPI build does not go with the CPU's torch;
LLaVA, Qwen-VL, InternVL and most others import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from omni_grpc.embedded import resolve

SIDE = 56
PATCH = 14
SCALE = 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
IMAGE_TOKEN = "<image>"
# The processor takes them from the tokenizer, by these very names.
MARKS = ("<fake_token_around_image>", IMAGE_TOKEN, "<end_of_utterance>", "<global-img>")

CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}\
{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_in_child(folder: Path) -> None:
    """As `build`, in a process of its own: torch and transformers stay out of this one."""
    command = [sys.executable, "-m", "tests.models.tiny_vision", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)


def build(folder: Path) -> None:
    """Writes the model into the folder."""
    import torch
    from transformers import Idefics3ForConditionalGeneration

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(_config(tokenizer))
    model.to(torch.bfloat16).save_pretrained(folder)
    _processor(tokenizer).save_pretrained(folder)


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:smollm2-135m-instruct"))
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(tokenizer: Any) -> Any:
    from transformers import Idefics3Config

    # Wide enough a spread of weights that a picture moves the logits well beyond bfloat16's noise.
    shared = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    return Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=SCALE,
        vision_config={**shared, "image_size": SIDE, "patch_size": PATCH},
        text_config={
            **shared,
            "model_type": "llama",
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 2048,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    return Idefics3Processor(
        image_processor=pictures,
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
