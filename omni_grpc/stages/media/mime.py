"""MIME types with parameters, as RFC 2045 writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_grpc.types import Modality

_MAJOR = {
    Modality.IMAGE: ("image",),
    Modality.AUDIO: ("audio", "video"),
    Modality.VIDEO: ("video", "image"),
}
"""Types that may hold the modality: MP4 and WebM carry sound alone too, and a GIF may be a film."""

_UNTOLD = ("", "application/octet-stream", "binary/octet-stream", "application/ogg")
"""Types that say nothing of what the content is."""


@dataclass(frozen=True, slots=True)
class MimeType:
    """A type in lower case ("audio/l16"), "" if none is given, and its parameters by lower-case
    name."""

    name: str
    params: dict[str, str] = field(default_factory=dict)

    @property
    def raw_sound(self) -> bool:
        """Whether it is 16-bit samples without a header."""
        return self.name in ("audio/l16", "audio/pcm")

    def fits(self, modality: Modality) -> bool:
        """Whether content of this type may be of the modality."""
        return self.name in _UNTOLD or self.name.partition("/")[0] in _MAJOR[modality]

    def integer(self, name: str, default: int | None = None) -> int:
        """A parameter as a positive number. ValueError says what is wrong with it."""
        text = self.params.get(name, "" if default is None else str(default))
        if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and int(text)):
            raise ValueError(f"needs {name}=NUMBER")
        return int(text)


def parse_mime_type(text: str) -> MimeType:
    """The type that `text` names; whatever it is, it does not raise."""
    name, *rest = text.split(";")
    pairs = (part.partition("=") for part in rest)
    params = {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs}
    return MimeType(name.strip().lower(), params)
