"""Media files for tests, made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw, ImageFont


def image_file(
    form: str = "PNG", size: tuple[int, int] = (30, 20), mode: str = "RGB", **options: Any
) -> bytes:
    """A picture file of one colour."""
    file = io.BytesIO()
    Image.new(mode, size, options.pop("color", 200)).save(file, form, **options)
    return file.getvalue()


def page(text: str, size: tuple[int, int] = (900, 220)) -> bytes:
    """A PNG with large dark text on white."""
    image = Image.new("RGB", size, "white")
    font = ImageFont.load_default(size=36)
    ImageDraw.Draw(image).multiline_text((20, 30), text, fill="black", font=font, spacing=12)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def noise(side: int) -> bytes:
    """A PNG that cannot be compressed, about 3 * side * side bytes."""
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def png_bomb(width: int, height: int, rows: int | None = None) -> bytes:
    """A picture of zeros whose pixels take hundreds of times the file's size, made without them.
    Of these `rows` are there; all if None."""
    packer = zlib.compressobj(1)
    row = bytes(1 + width * 3)
    count = height if rows is None else rows
    data = b"".join(packer.compress(row) for _ in range(count)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def webp_claiming(width: int, height: int) -> bytes:
    """A WebP file whose header claims a canvas of that size."""
    file = bytearray(image_file("WEBP", mode="RGBA", color=(1, 2, 3, 4), lossless=True))
    body = bytes(file[12:])
    canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    extended = b"VP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + canvas
    return b"RIFF" + struct.pack("<I", 4 + len(extended) + len(body)) + b"WEBP" + extended + body


def tone(seconds: float = 1.0, rate: int = 16000, channels: int = 1) -> np.ndarray:
    """A sine of half the full scale, [n, channels]."""
    wave = 0.5 * np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate)
    return wave[:, None].repeat(channels, 1).astype(np.float32)


def sound_file(
    samples: np.ndarray, rate: int, form: str = "WAV", subtype: str | None = None
) -> bytes:
    """A sound file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def wav_claiming(data_bytes: int, seconds: float = 1.0) -> bytes:
    """A WAV file of 16 kHz whose header claims that many bytes of samples."""
    file = bytearray(sound_file(tone(seconds), 16000))
    struct.pack_into("<I", file, 4, min(0xFFFFFFFF, data_bytes + 36))
    struct.pack_into("<I", file, 40, data_bytes)
    return bytes(file)


def film_file(
    form: str = "mp4",
    codec: str = "mpeg4",
    frames: int = 10,
    size: tuple[int, int] = (64, 48),
    pixels: str = "yuv420p",
) -> bytes:
    """A film at 10 frames a second that grows brighter."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        for number in range(frames):
            grey = np.full((size[1], size[0], 3), number * 20 % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
