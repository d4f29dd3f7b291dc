"""Folders of bigger models by their shape: configurations of known sizes, no weights that anybody
trained. What vLLM serves needs none at all (`load_format: dummy`); diffusers reads a folder's own,
so there are some of chance.

Only fields that configurations have had for years: the versions that read them differ. Neither
torch nor transformers is needed for vLLM's folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.tiny_vision import CHAT_TEMPLATE, IMAGE_TOKEN, MARKS

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# The places of a picture's parts; the processor wants them for 6 by 6 at most.
PARTS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]

QWEN2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 364,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PATCH = 14
SCALE = 2


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of one run."""

    llm: dict[str, int]
    vlm_text: dict[str, int]
    vlm_vision: dict[str, int]
    picture_side: int
    """Of what the DiT draws, in pixels."""

    @property
    def tile(self) -> int:
        """Tokens of one part of a picture."""
        return int((self.vlm_vision["image_size"] // PATCH // SCALE) ** 2)


BIG = Shapes(QWEN2_7B, LLAMA3_8B, SIGLIP_SO400M, 512)
SMALL = Shapes(
    {**TINY, "num_key_value_heads": 1},
    {**TINY, "num_key_value_heads": 2},
    {**TINY, "image_size": 56},
    64,
)


def build_llm(model: Path, shapes: Shapes, folder: Path) -> Path:
    """Qwen2's architecture, with the model's tokenizer."""
    folder.mkdir(parents=True)
    vocabulary = _copy_tokenizer(model, folder)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **shapes.llm,
        **_text(model, vocabulary),
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "use_sliding_window": False,
    }
    _write(folder / "config.json", config)
    return folder


def build_vlm(model: Path, shapes: Shapes, folder: Path) -> Path:
    """Idefics3's architecture: Llama 3 behind SigLIP. A picture is cut into parts of `image_size`,
    at most two by two, and is there once more as a whole: vLLM 0.26 takes none in one piece."""
    folder.mkdir(parents=True)
    vocabulary = _copy_tokenizer(model, folder, [*MARKS, *PARTS])
    numbers = _numbers(folder)
    text = {"model_type": "llama", **shapes.vlm_text, **_text(model, vocabulary)}
    side = shapes.vlm_vision["image_size"]
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": numbers[IMAGE_TOKEN],
        "pad_token_id": text["pad_token_id"],
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": {**text, "rope_theta": 500000.0, "rms_norm_eps": 1e-05},
        "vision_config": {
            "model_type": "idefics3_vision",
            "patch_size": PATCH,
            **shapes.vlm_vision,
        },
    }
    _write(folder / "config.json", config)
    pictures = {
        "processor_class": "Idefics3Processor",
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": side},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 2 * side},
    }
    _write(folder / "preprocessor_config.json", pictures)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": shapes.tile}
    _write(folder / "processor_config.json", processor)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def build_dit(folder: Path, *, small: bool) -> Path:
    """PixArt-Sigma: 28 layers of 1,728 (1.4 B), a text encoder of T5-XL's size (1.2 B), the
    autoencoder of Stable Diffusion. Heavy, and slow: for a process of its own."""
    import torch

    from tests.models.tiny_diffusers import ImageSizes, build_image

    if small:
        return build_image(folder)
    encoder = {
        "d_model": 2048,
        "d_kv": 64,
        "d_ff": 5120,
        "num_layers": 24,
        "num_heads": 32,
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
    }
    sizes = ImageSizes(
        channels=(128, 256, 512, 512), depth=2, groups=32, heads=24, head=72, layers=28, side=64,
        encoder=encoder, spread=0.02,
    )  # fmt: skip
    return build_image(folder, sizes, torch.bfloat16)


def building_dit(folder: Path, *, small: bool) -> subprocess.Popen[str]:
    """`build_dit` in a process of its own, on the CPU: engines that start meanwhile measure the
    GPU's free memory."""
    command = [sys.executable, "-m", "tests.gpu.shapes", str(folder), *(["small"] * small)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def _text(model: Path, vocabulary: int) -> dict[str, Any]:
    """What any language model's configuration says beside its sizes."""
    own = json.loads((model / "config.json").read_text())
    tokens = {name: own.get(name) for name in ("bos_token_id", "eos_token_id")}
    return {
        **tokens,
        "pad_token_id": own.get("eos_token_id"),
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _copy_tokenizer(model: Path, folder: Path, marks: list[str] | None = None) -> int:
    """The model's tokenizer, and these special tokens after it. How many tokens it has."""
    for name in TOKENIZER_FILES:
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        # Templates and lists of tokens there would be over what is said here.
        told = json.loads(settings.read_text())
        drop = {"chat_template", "added_tokens_decoder", "additional_special_tokens"}
        _write(settings, {key: value for key, value in told.items() if key not in drop})
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = max(_numbers(folder).values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for mark in marks or []:
        tokenizer["added_tokens"].append(
            {"id": vocabulary, "content": mark, **plain, "special": True}
        )
        vocabulary += 1
    _write(file, tokenizer)
    return vocabulary


def _numbers(folder: Path) -> dict[str, int]:
    """All tokens of a folder's tokenizer, and their numbers."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **added}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    build_dit(Path(sys.argv[1]), small="small" in sys.argv[2:])
