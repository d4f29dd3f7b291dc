"""Pipelines of diffusers with tiny networks and weights of chance, built from their configurations
without any hub: real in every way but what they draw.

    python -m tests.models.tiny_diffusers image|video FOLDER
"""

from __future__ import annotations

import string
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

WIDTH = 32


def _encoder() -> dict[str, Any]:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return {**sizes, "vocab_size": 128, "relative_attention_num_buckets": 8}


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """How large the networks of `build_image` are."""

    channels: tuple[int, ...] = (8, 8, 8, 8)
    """Of the autoencoder, level by level."""
    depth: int = 1
    groups: int = 4
    heads: int = 2
    head: int = 8
    layers: int = 2
    side: int = 8
    """Of the latents of a picture of the default size."""
    encoder: dict[str, Any] = field(default_factory=_encoder)
    spread: float = 0.2
    """Of the transformer's weights."""


def build_image(folder: Path, sizes: ImageSizes | None = None, dtype: Any = None) -> Path:
    """PixArt-Sigma: a DiT over 8 times smaller latents in patches of 2, so sizes are multiples of
    16. Saved as `dtype`, by default float32."""
    sizes = sizes or ImageSizes()
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=sizes.channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=sizes.depth,
        norm_num_groups=sizes.groups,
        latent_channels=4,
        scaling_factor=0.5,
    )
    transformer = PixArtTransformer2DModel(
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head,
        in_channels=4,
        out_channels=8,
        num_layers=sizes.layers,
        cross_attention_dim=sizes.heads * sizes.head,
        sample_size=sizes.side,
        patch_size=2,
        caption_channels=sizes.encoder["d_model"],
        use_additional_conditions=False,
    )
    _scatter(transformer, sizes.spread)
    pipeline = PixArtSigmaPipeline(
        tokenizer=_tokenizer(),
        text_encoder=T5EncoderModel(T5Config(**sizes.encoder)),
        vae=vae,
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    if dtype is not None:
        pipeline.to(dtype=dtype)
    pipeline.save_pretrained(folder)
    return folder


def build_video(folder: Path) -> Path:
    """Wan: a DiT over latents that are 8 times smaller in space and 4 times in time."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    _scatter(transformer)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=UMT5EncoderModel(UMT5Config(**_encoder())),
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )
    pipeline.save_pretrained(folder)
    return folder


def build_packed(folder: Path) -> Path:
    """Flux: its latents are a row of patches, and its guidance is distilled."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    vae = AutoencoderKL(
        block_out_channels=(4,),
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    words = {
        piece: number
        for number, piece in enumerate(
            ["<|startoftext|>", "<|endoftext|>", *(f"{c}</w>" for c in string.ascii_lowercase)]
        )
    }
    clip = {"hidden_size": WIDTH, "intermediate_size": 32, "projection_dim": WIDTH}
    pipeline = FluxPipeline(
        tokenizer=CLIPTokenizer(vocab=words, merges=[], model_max_length=77),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                **clip, vocab_size=100, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
            )
        ),
        tokenizer_2=_tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(**_encoder())),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.save_pretrained(folder)
    return folder


def build_lora(pipeline: Path, folder: Path) -> Path:
    """A LoRA of chance for the attention of `build_video`'s pipeline."""
    from peft import LoraConfig, get_peft_model_state_dict

    torch.manual_seed(1)
    transformer = WanTransformer3DModel.from_pretrained(pipeline, subfolder="transformer")
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0"]))
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    layers = get_peft_model_state_dict(transformer)
    WanPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


def _tokenizer() -> Any:
    """One token per character."""
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [*special, "▁", *string.ascii_lowercase, *string.digits, *string.punctuation]
    return T5Tokenizer(vocab=[(piece, 0.0) for piece in pieces], extra_ids=0)


def _scatter(network: torch.nn.Module, spread: float = 0.2) -> None:
    """Fresh networks start with zeros where the prompt comes in, which would hide it."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=spread)


if __name__ == "__main__":
    {"image": build_image, "video": build_video}[sys.argv[1]](Path(sys.argv[2]))
