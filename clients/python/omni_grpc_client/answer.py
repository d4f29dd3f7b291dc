"""A request's whole answer, put together from its events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from omni_grpc_client.events import (
    Accepted,
    AudioChunk,
    Event,
    Finished,
    ImageChunk,
    TensorChunk,
    TextDelta,
    Timings,
    Usage,
    VideoChunk,
)
from omni_grpc_client.media import Audio, AudioFormat, Image, OutputFormat, Tensor, Video


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a request gave. What the pipeline does not make, or was not asked for, is empty."""

    accepted: Accepted
    finished: Finished
    texts: tuple[str, ...]
    """One per index (sampling with n above 1 gives several)."""
    audio: Audio | None
    images: tuple[Image, ...]
    video: Video | None
    tensors: tuple[Tensor, ...]

    @property
    def text(self) -> str:
        """The text, of the first index where there are several."""
        return self.texts[0] if self.texts else ""

    @property
    def request_id(self) -> str:
        """The request's id, the caller's or the server's."""
        return self.accepted.request_id

    @property
    def usage(self) -> Usage:
        """What was used."""
        return self.finished.usage

    @property
    def timings(self) -> Timings:
        """Where the time went."""
        return self.finished.timings


class Parts:
    """Joins the parts of pictures: `add` gives the whole picture with its last part."""

    def __init__(self) -> None:
        self._open: defaultdict[tuple[str, int, int], list[bytes]] = defaultdict(list)

    def add(self, part: ImageChunk) -> Image | None:
        """The picture that `part` ends, else None."""
        key = (part.stage, part.index, part.segment)
        self._open[key].append(part.data)
        if not part.last:
            return None
        return Image(b"".join(self._open.pop(key)), part.mime_type, part.width, part.height)


class Outputs:
    """Collects the outputs among events, in the order in which they came. What can be had at any
    time is what came until then; `formats` are those that `accepted` tells."""

    def __init__(self, formats: tuple[OutputFormat, ...] = ()) -> None:
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._audio: list[bytes] = []
        self._audio_format = audio_format(formats)
        self._parts = Parts()
        self._images: list[Image] = []
        self._video: list[VideoChunk] = []
        self._tensors: defaultdict[str, list[TensorChunk]] = defaultdict(list)

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case TextDelta():
                self._texts[event.index].append(event.text)
            case AudioChunk():
                self._audio.append(event.data)
                self._audio_format = event.format
            case ImageChunk():
                if image := self._parts.add(event):
                    self._images.append(image)
            case VideoChunk():
                self._video.append(event)
            case TensorChunk():
                self._tensors[event.name].append(event)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, by index."""
        return tuple("".join(self._texts[index]) for index in sorted(self._texts))

    @property
    def audio(self) -> Audio | None:
        """The sound; None where none was to be expected."""
        return Audio(b"".join(self._audio), self._audio_format) if self._audio_format else None

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures that are whole."""
        return tuple(self._images)

    @property
    def video(self) -> Video | None:
        """The film; None where no chunk came."""
        if not self._video:
            return None
        frames = sum(chunk.frame_count for chunk in self._video)
        data = b"".join(chunk.data for chunk in self._video)
        return Video(data, self._video[0].mime_type, frames)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays."""
        return tuple(_tensor(chunks) for chunks in self._tensors.values())


class AnswerBuilder:
    """Collects events in the order in which they came; `build` after the last."""

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None
        self._outputs = Outputs()

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case Accepted():
                self._accepted = event
                self._outputs = Outputs(event.outputs)
            case Finished():
                self._finished = event
            case _:
                self._outputs.add(event)

    def build(self) -> Answer:
        """The answer. Raises ValueError before `finished` has come."""
        if self._accepted is None or self._finished is None:
            raise ValueError("the request has not finished")
        outputs = self._outputs
        return Answer(
            self._accepted,
            self._finished,
            outputs.texts,
            outputs.audio,
            outputs.images,
            outputs.video,
            outputs.tensors,
        )


def audio_format(outputs: tuple[OutputFormat, ...]) -> AudioFormat | None:
    """The format of the sound among a request's outputs, where it is known beforehand."""
    return next((o.format for o in outputs if isinstance(o.format, AudioFormat)), None)


def _tensor(chunks: list[TensorChunk]) -> Tensor:
    first = chunks[0]
    return Tensor(first.name, b"".join(c.data for c in chunks), first.dtype, first.shape)
