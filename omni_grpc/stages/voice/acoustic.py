"""The acoustic stage: a clause's text → frames of conditioning and fundamental frequency."""

import json
import re
import textwrap
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from hibari.tts import ASSETS, DEFAULT, MAX_PHONEMES, Hibari

FRAME_RATE = 80  # frames per second: one per 12.5 ms
SAMPLE_RATE = 24000  # Hz
CHANNELS = 130
MIN_SPEED, MAX_SPEED = 0.25, 4.0

_LONG_NUMBER = re.compile(r"\d(?:,?\d){15,}")


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """F frames of speech, 12.5 ms each."""

    conditioning: npt.NDArray[np.float32]
    """[130, F]: what the decoder makes spectra from."""
    f0: npt.NDArray[np.float32]
    """[F]: fundamental frequency in Hz; below 40 the frame is unvoiced."""


class Acoustic:
    """hibari's text side and the first half of its model.

    `folder` holds `acoustic.onnx` as `build.build` writes it. Calls from several threads are
    safe: it keeps nothing of a clause.
    """

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._phonemizer = _Phonemizer()
        self._session = open_session(folder / "acoustic.onnx", threads)

    def speak(self, clause: str, *, speed: float = 1.0) -> list[Frames]:
        """The clause's frames, one `Frames` per utterance; [] if nothing in it can be spoken.

        Usually one utterance. Several if the text holds several sentences or more phonemes than
        the model was trained on (400). The same clause gives the same frames, on one kind of
        processor and with the same `threads` (another number of threads may round differently).
        `speed` 1.0 is the voice's own pace, 2.0 twice as fast. Raises ValueError for a speed
        outside [0.25, 4].
        """
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise ValueError(f"speed must be in [{MIN_SPEED}, {MAX_SPEED}], got {speed}")
        pieces = self._phonemizer.phonemize(_readable(clause))
        # hibari splits at clause punctuation only; "WWW…" or a long list has none.
        bounded = [part for piece in pieces for part in textwrap.wrap(piece, MAX_PHONEMES)]
        return [
            self._infer(ids, speed)
            for part in bounded
            if len(ids := self._phonemizer.ids(part)) > 2  # more than the two pads
        ]

    def _infer(self, ids: list[int], speed: float) -> Frames:
        inputs = {
            "ids": np.array([ids], np.int64),
            "speed": np.array([speed], np.float32),
        }
        conditioning, f0 = self._session.run(None, inputs)
        return Frames(conditioning[0], f0[0])


class _Phonemizer(Hibari):  # type: ignore[misc]  # hibari ships no types
    """hibari's phonemize and ids without its constructor, which would load the uncut model."""

    def __init__(self) -> None:
        self.voice = DEFAULT
        self.vocab = json.loads((Path(ASSETS) / "vocab.json").read_text(encoding="utf-8"))
        self._g2p = None
        # Loads the lexicon, the tagger and the net for unknown words now, not on first use.
        _ = self.g2p.oov


def _readable(text: str) -> str:
    """Rewrites the two kinds of numbers that hibari's phonemizer fails on.

    It knows no name for 10^36 and beyond (numbers over 15 digits are read digit by digit), and
    takes digits like ① for something that int() reads. Squares and cubes it reads well.
    """
    text = "".join(
        f" {unicodedata.digit(char)} "
        if char.isdigit() and not char.isdecimal() and char not in "²³"
        else char
        for char in text
    )
    return _LONG_NUMBER.sub(lambda number: " ".join(number[0].replace(",", "")), text)


def open_session(path: Path, threads: int = 1) -> ort.InferenceSession:
    """An onnxruntime session on the CPU, for a model that is whole or cut.

    ORT_ENABLE_BASIC because the fusions of higher levels round int8 differently in the halves
    than in the whole.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
