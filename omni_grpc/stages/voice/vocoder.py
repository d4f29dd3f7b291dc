"""The vocoder stage: frames → samples, in a stream whose cuts leave no trace.

The signal model is hibari's (see `hibari.dsp`): a pulse train of the fundamental frequency,
filtered; plus shaped noise; plus a spectrum of free phase; one inverse STFT (n_fft 1200, hop 300).

Everything runs on a fixed grid of 40-frame blocks counted from the utterance's start. The decoder
quantises to int8 with scales taken from whatever window it sees, so only windows that don't
depend on the pushes give samples that don't.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from hibari import dsp
from scipy.special import diric

from omni_grpc.stages.voice.acoustic import CHANNELS, SAMPLE_RATE, Frames, open_session

BLOCK = 40  # frames per decoder call
CONTEXT = 27  # frames that the decoder sees to either side: its receptive field
HOP: int = dsp.HOP
BINS: int = dsp.N_FFT // 2 + 1
VOICED = 40.0  # Hz: a lower fundamental frequency means unvoiced
HIGHEST_HARMONIC = 11000.0  # Hz

Samples = npt.NDArray[np.float32]
Spectrum = npt.NDArray[np.complex64]


class Vocoder:
    """hibari's decoder, shared by any number of streams and threads.

    `folder` holds `decoder.onnx` as `build.build` writes it.
    """

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._session = open_session(folder / "decoder.onnx", threads)
        self._input = self._session.get_inputs()[0].name

    def decode(self, conditioning: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[130, n] → [5, 601, n]: lh, theta, ln, lr, phi (see `hibari.dsp`)."""
        window = np.ascontiguousarray(conditioning)[None]
        return np.concatenate(self._session.run(None, {self._input: window}))

    def stream(self, seed: int) -> "VocoderStream":
        """A stream whose noise is drawn from `seed` (>= 0)."""
        return VocoderStream(self, seed)


class VocoderStream:
    """One voice's utterances, one after the other. Not for several threads at once.

    However an utterance's frames are cut into pushes, the samples in total are the same, bit for
    bit. Holds some 130 frames. An abandoned stream needs no closing.
    """

    def __init__(self, vocoder: Vocoder, seed: int) -> None:
        self._vocoder = vocoder
        self._noise = np.random.default_rng(seed)
        self._utterance = _Utterance(vocoder, self._noise)

    def push(self, frames: Frames) -> Samples:
        """Takes any number of frames; the samples (24 kHz, about ±1) that are final now.

        Raises ValueError, and takes nothing, unless the shapes are [130, n] and [n].
        """
        conditioning = np.asarray(frames.conditioning, np.float32)
        f0 = np.asarray(frames.f0, np.float32)
        if conditioning.ndim != 2 or conditioning.shape[0] != CHANNELS:
            raise ValueError(f"conditioning has shape {conditioning.shape}, not ({CHANNELS}, n)")
        if f0.shape != conditioning.shape[1:]:
            raise ValueError(f"f0 has shape {f0.shape}, not {conditioning.shape[1:]}")
        return self._utterance.push(conditioning, f0)

    def end_utterance(self) -> Samples:
        """The utterance's last samples: 300 per frame it had, in all. The noise goes on."""
        samples = self._utterance.end()
        self._utterance = _Utterance(self._vocoder, self._noise)
        return samples


class _Utterance:
    """What one utterance carries from block to block. Frames count from its start."""

    def __init__(self, vocoder: Vocoder, noise: np.random.Generator) -> None:
        self._vocoder = vocoder
        self._noise = noise
        self._conditioning = np.empty((CHANNELS, 0), np.float32)
        self._f0 = np.empty(0, np.float32)
        self._base = 0  # the first frame of these two
        self._start = 0  # the next block's first frame
        self._phase = 0.0  # of the pulses, in cycles
        self._pulses = np.empty(0, np.float32)  # the last three frames' samples
        self._spectrum: Spectrum = np.empty((BINS, 0), np.complex64)  # the last three frames

    def push(self, conditioning: npt.NDArray[np.float32], f0: npt.NDArray[np.float32]) -> Samples:
        self._conditioning = np.concatenate([self._conditioning, conditioning], axis=1)
        self._f0 = np.concatenate([self._f0, f0])
        return self._advance(ended=False)

    def end(self) -> Samples:
        return self._advance(ended=True)

    def _advance(self, *, ended: bool) -> Samples:
        """Every block whose context to the right is here, or never will be."""
        total = self._base + len(self._f0)
        reach = total if ended else total - BLOCK - CONTEXT + 1
        blocks = [np.empty(0, np.float32)]
        while self._start < reach:
            stop = min(self._start + BLOCK, total)
            blocks.append(self._block(self._start, stop, total))
            self._start = stop
        self._forget()
        return np.concatenate(blocks)

    def _forget(self) -> None:
        """Drops the frames that no later block looks at (copies: a view would keep them)."""
        base = max(self._start - CONTEXT, 0)
        if base > self._base:
            self._conditioning = self._conditioning[:, base - self._base :].copy()
            self._f0 = self._f0[base - self._base :].copy()
            self._base = base

    def _block(self, start: int, stop: int, total: int) -> Samples:
        """Decodes the frames [start, stop) of `total` known ones; the samples now final."""
        left, right = max(start - CONTEXT, 0), min(stop + CONTEXT, total)
        window = self._conditioning[:, left - self._base : right - self._base]
        decoded = self._vocoder.decode(window)[:, :, start - left : stop - left]
        noise = self._noise.standard_normal((stop - start, 2 * BINS), np.float32)
        source = self._source(start, stop, total)
        spectrum = _mix(decoded, source, noise.view(np.complex64).T)
        return self._overlap_add(spectrum, last=stop == total)

    def _source(self, start: int, stop: int, total: int) -> Spectrum:
        """The pulses' STFT [601, stop - start].

        A frame's window spans two frames before its start to two after, so the pulses run from
        two frames before the block to one past it; `dsp.stft` reflects them at the utterance's
        ends, and what it reflects at a block's edge falls on frames that are cut off here.
        """
        fresh = self._pulse_train(start + 1 if start else 0, min(stop + 1, total))
        pulses = np.concatenate([self._pulses, fresh])
        self._pulses = pulses[-3 * HOP :].copy()
        before = min(start, 2)
        spectrum: Spectrum = dsp.stft(pulses, before + stop - start)[:, before:]
        return spectrum

    def _pulse_train(self, first: int, last: int) -> Samples:
        """Samples of the frames [first, last): sum of cosines at every harmonic, 0 if unvoiced.

        sum_{h=1..H} cos(h t) = (D(t) - 1) / 2 with Dirichlet's kernel D(t) = sin((2H+1) t/2) /
        sin(t/2). The phase is summed up in float64, on the grid: no cut can shift it.
        """
        knots = np.arange(max(first - 1, 0), min(last + 1, self._base + len(self._f0)))
        position = (np.arange(first * HOP, last * HOP) + 0.5) / HOP - 0.5
        f0 = np.interp(position, knots, self._f0[knots - self._base])
        pitch = np.maximum(f0, VOICED)
        cycles = np.cumsum(np.concatenate([[self._phase], pitch / SAMPLE_RATE]))
        self._phase = cycles[-1] % 1.0
        count = 2 * np.floor(HIGHEST_HARMONIC / pitch) + 1
        kernel = count * diric(2 * np.pi * (cycles[1:] % 1.0), count)
        pulses: Samples = np.where(f0 > VOICED, (kernel - 1) / 2, 0.0).astype(np.float32)
        return pulses

    def _overlap_add(self, spectrum: Spectrum, *, last: bool) -> Samples:
        """Inverse STFT; a hop of samples is final when the frames h-1 .. h+2 have been added.

        `dsp.ola` begins anew each time, three frames back: its tapered ends are cut off, save at
        the utterance's own ends.
        """
        seam = 1 if self._spectrum.shape[1] else 0
        joined = np.concatenate([self._spectrum, spectrum], axis=1)
        self._spectrum = joined[:, -3:].copy()
        final = joined.shape[1] - (0 if last else 2)
        samples: Samples = dsp.ola(joined)[seam * HOP : final * HOP]
        return samples


def _mix(decoded: npt.NDArray[np.float32], source: Spectrum, noise: Spectrum) -> Spectrum:
    """S = exp(lh) e^(i pi tanh(theta)) source + exp(ln) noise + exp(lr) e^(i phi)."""
    lh, theta, ln, lr, phi = decoded
    spectrum: Spectrum = _polar(lh, np.pi * np.tanh(theta)) * source
    spectrum += dsp.ex(ln) * noise
    spectrum += _polar(lr, phi)
    return spectrum


def _polar(log_magnitude: npt.NDArray[np.float32], angle: npt.NDArray[np.float32]) -> Spectrum:
    spectrum: Spectrum = dsp.ex(log_magnitude) * (np.cos(angle) + 1j * np.sin(angle))
    return spectrum


def to_pcm16(samples: Samples) -> bytes:
    """16-bit little-endian PCM; what lies beyond ±1 is clipped."""
    pcm: npt.NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
    return pcm.tobytes()
