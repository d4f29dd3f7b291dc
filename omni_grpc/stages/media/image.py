"""Pictures, by Pillow. Their size is known before a pixel is decoded."""

from __future__ import annotations

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from omni_grpc.config import MediaPolicy
from omni_grpc.stages.media.decoded import DecodedImage, Unfit, check_decoded_bytes, check_pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Not all of Pillow's: some formats run other programs, and most have seen few hostile files."""

PIXEL_BYTES = 4
"""Pillow keeps RGB in four bytes."""


def decode_image(data: bytes, policy: MediaPolicy) -> DecodedImage:
    """The picture in a file's bytes. Raises Unfit, or what Pillow raises for broken files."""
    try:
        # Pillow's own guard raises for what is absurd; ours is the policy's.
        file = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unfit(f"has more than {policy.max_pixels} pixels") from None
    except UnidentifiedImageError:
        raise Unfit(f"is not a picture of a known format ({', '.join(FORMATS)})") from None
    with file:
        check_pixels(*file.size, policy.max_pixels)
        check_decoded_bytes(file.width * file.height * PIXEL_BYTES, policy.max_decoded_bytes)
        file.load()
        return DecodedImage(flatten(ImageOps.exif_transpose(file)))


def flatten(image: Image.Image) -> Image.Image:
    """The picture in RGB, over white where it is transparent: as a page is, not as its hidden
    colour channels happen to be."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Image.new("RGB", image.size, "white")
    layer = image.convert("RGBA")
    opaque.paste(layer, mask=layer)
    return opaque
