"""Any diffusers pipeline, text to picture or text to film, behind one way to call it.

What a pipeline takes is read off the signature of its call, what it draws in (multiples of pixels,
of frames) off its components. Blocking: one thread at a time."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from omni_grpc.stages.encode import Values

log = logging.getLogger("omni_grpc.replica")

WARM_UP_SIDE = 64
"""Least side of the picture that is drawn to warm up, in pixels."""

OnStep = Callable[[int, int, Any], None]
"""Steps done, steps in all, latents. What it raises ends the drawing."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is to be drawn; None is the pipeline's own default."""

    prompt: str
    negative: str | None = None
    steps: int = 1
    guidance: float | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    seed: int = 0
    scheduler: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA that is loaded from the start: a file or a folder, and how strongly it acts."""

    path: str
    scale: float = 1.0
    weight_name: str | None = None


_ARGUMENTS = {
    "prompt": "prompt",
    "negative_prompt": "negative",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "width": "width",
    "height": "height",
    "num_frames": "frames",
    "frame_rate": "fps",
}
"""Arguments of a pipeline's call, and the fields of a Drawing that they get."""

_FIXED = {
    "output_type": "np",
    # Both would give something else than was asked for.
    "use_resolution_binning": False,
    "clean_caption": False,
}


class DiffusersModel:
    """A loaded pipeline."""

    def __init__(
        self, folder: str, device: str, dtype: str | Mapping[str, str], **load_args: Any
    ) -> None:
        types = (
            getattr(torch, dtype)
            if isinstance(dtype, str)
            else {part: getattr(torch, name) for part, name in dtype.items()}
        )
        self.pipe: Any = DiffusionPipeline.from_pretrained(
            folder, dtype=types, local_files_only=True, **load_args
        )
        self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(self.pipe.__call__).parameters
        self._scheduler = self.pipe.scheduler
        self.schedulers = _compatible(self._scheduler)

    # ------------------------------------------------------------ what it is

    @property
    def video(self) -> bool:
        """Whether it makes films."""
        return "num_frames" in self._takes

    def takes(self, argument: str) -> bool:
        """Whether its call has this argument."""
        return argument in self._takes

    def default(self, argument: str) -> Any:
        """What its call takes where this argument is left out; None if it has none."""
        parameter = self._takes.get(argument)
        if parameter is None or parameter.default is inspect.Parameter.empty:
            return None
        return parameter.default

    @property
    def guided_by_negative(self) -> bool:
        """Whether a negative prompt acts through the guidance scale. Not where guidance is
        distilled into the model: there `true_cfg_scale` turns on another one."""
        return self.takes("negative_prompt") and not self.takes("true_cfg_scale")

    @property
    def multiple(self) -> int:
        """What width and height must be a multiple of: the autoencoder's factor times a patch."""
        scale = next(
            getattr(self.pipe, name)
            for name in (
                "vae_scale_factor_spatial",
                "vae_spatial_compression_ratio",
                "vae_scale_factor",
            )
            if hasattr(self.pipe, name)
        )
        processor = getattr(self.pipe, "video_processor", None) or self.pipe.image_processor
        network = getattr(self.pipe, "transformer", None)
        patch = network.config.get("patch_size", 1) if network is not None else 1
        patch = patch[-1] if isinstance(patch, list | tuple) else patch
        return math.lcm(scale * (patch or 1), processor.config.vae_scale_factor)

    @property
    def frame_multiple(self) -> int:
        """A film has this many frames times some number, and one."""
        for name in ("vae_scale_factor_temporal", "vae_temporal_compression_ratio"):
            if hasattr(self.pipe, name):
                return int(getattr(self.pipe, name))
        return 1

    def excess_tokens(self, text: str) -> tuple[int, int] | None:
        """(tokens, most) of a prompt that is too long, whose end the pipeline would cut off."""
        names = ("tokenizer_3", "tokenizer_2", "tokenizer")
        tokenizer = next((t for n in names if (t := getattr(self.pipe, n, None))), None)
        if tokenizer is None:
            return None
        most = self.default("max_sequence_length") or tokenizer.model_max_length
        tokens = len(tokenizer(text, truncation=False).input_ids)
        return (tokens, most) if tokens > most else None

    def refusal(self, drawing: Drawing) -> str | None:
        """What the pipeline itself has against a drawing, in its own words."""
        check = getattr(self.pipe, "check_inputs", None)
        if check is None:
            return None
        given = self._arguments(drawing)
        values = {
            name: given.get(name, self.default(name))
            for name in inspect.signature(check).parameters
        }
        for side in ("width", "height"):
            if side in values and values[side] is None:
                values[side] = self.multiple
        try:
            check(**values)
        except ValueError as error:
            return str(error)
        return None

    # ------------------------------------------------------------ what it does

    def load_adapters(self, adapters: list[Adapter]) -> None:
        """Loads LoRAs, all in force at once."""
        names = [f"lora{number}" for number in range(len(adapters))]
        for name, adapter in zip(names, adapters, strict=True):
            self.pipe.load_lora_weights(
                adapter.path,
                weight_name=adapter.weight_name,
                adapter_name=name,
                local_files_only=True,
            )
        if names:
            self.pipe.set_adapters(names, [adapter.scale for adapter in adapters])

    def draw(self, drawing: Drawing, on_step: OnStep) -> Values:
        """The picture [3, height, width], or the film [frames, 3, height, width], of 0 to 1."""
        kind = self.schedulers.get(drawing.scheduler or "", type(self._scheduler))
        # A new one each time: it carries the state of its steps.
        self.pipe.scheduler = kind.from_config(self._scheduler.config)
        done = self.pipe(**self._arguments(drawing), **self._callback(drawing, on_step))
        drawn = np.asarray((done.frames if self.video else done.images)[0], np.float32)
        if not np.isfinite(drawn).all():
            raise ArithmeticError("the pipeline gave values that are no numbers: try another dtype")
        return np.moveaxis(drawn, -1, -3)

    def _arguments(self, drawing: Drawing) -> dict[str, Any]:
        values = {name: getattr(drawing, field) for name, field in _ARGUMENTS.items()}
        given = {n: v for n, v in (values | _FIXED).items() if v is not None and self.takes(n)}
        # On the CPU, so that a seed gives the same noise on every device.
        return given | {"generator": torch.Generator().manual_seed(drawing.seed)}

    def _callback(self, drawing: Drawing, on_step: OnStep) -> dict[str, Any]:
        def at_step(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            total = getattr(self.pipe, "num_timesteps", None) or drawing.steps
            on_step(step + 1, total, tensors.get("latents"))
            return tensors

        def at_older_step(step: int, _: Any, latents: Any) -> None:
            # Called once per step, however often the model ran for it; some schedulers add steps.
            scheduler = self.pipe.scheduler
            total = max(drawing.steps, len(scheduler.timesteps) // scheduler.order)
            on_step(step + 1, total, latents)

        if self.takes("callback_on_step_end"):
            return {"callback_on_step_end": at_step}
        if self.takes("callback"):
            return {"callback": at_older_step}
        log.warning("%s tells no steps: a cancel waits for its end", type(self.pipe).__name__)
        return {}

    @torch.no_grad()
    def glimpse(self, latents: Any, drawing: Drawing) -> Values:
        """What latents look like now, [3, height, width] of 0 to 1; of a film the first frame.
        Raises where the pipeline's latents are of a form that is not known here."""
        vae = self.pipe.vae
        config, channels = vae.config, _latent_channels(vae)
        latents = self._unpacked(latents, drawing)
        if latents.ndim == 5:
            # Channels come before frames, or (CogVideoX) after them.
            ordered = latents if latents.shape[1] == channels else latents.transpose(1, 2)
            latents = ordered[:, :, :1]
        if latents.ndim not in (4, 5) or latents.shape[1] != channels:
            raise NotImplementedError(f"latents of shape {tuple(latents.shape)}")
        decoded = vae.decode(_unscaled(latents.to(vae.dtype), config), return_dict=False)[0]
        picture = decoded[0, :, 0] if decoded.ndim == 5 else decoded[0]
        values: Values = ((picture.float() + 1) / 2).clamp(0, 1).cpu().numpy()
        return values

    def _unpacked(self, latents: Any, drawing: Drawing) -> Any:
        """A picture again from a row of patches, as Flux and its kin have them."""
        unpack = getattr(self.pipe, "_unpack_latents", None)
        if latents.ndim != 3 or unpack is None:
            return latents
        scale = self.pipe.vae_scale_factor
        side = getattr(self.pipe, "default_sample_size", 0) * scale
        return unpack(latents, drawing.height or side, drawing.width or side, scale)

    def warm_up(self) -> bool:
        """Draws the smallest picture in one step. Whether its latents can be looked at."""
        side = -(-WARM_UP_SIDE // self.multiple) * self.multiple
        drawing = Drawing("warm up", steps=1, width=side, height=side, frames=1)
        seen: list[bool] = []

        def look(step: int, total: int, latents: Any) -> None:
            try:
                self.glimpse(latents, drawing)
            except Exception as error:
                log.info("no previews from this pipeline: %s", error)
                seen.append(False)
            else:
                seen.append(True)

        self.draw(drawing, look)
        return bool(seen) and all(seen)


def _latent_channels(vae: Any) -> int:
    config = vae.config
    return int(config.get("latent_channels") or config.get("z_dim"))


def _unscaled(latents: Any, config: Any) -> Any:
    """Latents as the autoencoder made them, from what the denoiser works on."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        shape = (1, -1) + (1,) * (latents.ndim - 2)
        return latents * latents.new_tensor(std).view(shape) + latents.new_tensor(mean).view(shape)
    return latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)


def _compatible(scheduler: Any) -> dict[str, Any]:
    """The schedulers that can take this one's place, by name; itself first."""
    found = {type(scheduler).__name__: type(scheduler)}
    flow = scheduler.config.get("prediction_type") == "flow_prediction"
    for kind in sorted(scheduler.compatibles, key=lambda kind: str(kind.__name__)):
        # Some know no flow matching and say so at the first step only.
        if flow and "use_flow_sigmas" not in inspect.signature(kind.__init__).parameters:
            continue
        try:
            kind.from_config(scheduler.config)
        except Exception as error:
            log.info("scheduler %s is left out: %s", kind.__name__, error)
        else:
            found[kind.__name__] = kind
    return found
