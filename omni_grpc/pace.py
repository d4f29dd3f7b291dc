"""How steadily a request's outputs come: first ones, gaps between them, sound that comes too late
to be played on."""

from __future__ import annotations

import time

from omni_grpc.metrics import Buckets, Metrics
from omni_grpc.types import Audio, Modality, Payload


class Track:
    """The outputs of one stage."""

    __slots__ = ("byte_rate", "gaps", "last_at", "plays_until", "seconds", "turns")

    def __init__(self, gaps: Buckets, now: float) -> None:
        self.gaps = gaps
        self.plays_until = now
        self.last_at: float | None = None
        """When the answer that goes on gave its last output; None: none goes on."""
        self.byte_rate = 0
        """Bytes of a second of its sound."""
        self.seconds = 0.0
        """Length of the sound."""
        self.turns = 0
        """Answers that ended."""


class Pace:
    """One request's. Times are those at which final stages gave something: how fast a client reads
    does not show in them, but for stages that pause because of it."""

    def __init__(self, metrics: Metrics, pipeline: str) -> None:
        self.first_output_s: float | None = None
        self._metrics = metrics
        self._pipeline = pipeline
        self._arrived_at = time.perf_counter()
        self._tracks: dict[str, Track] = {}

    def output(self, stage: str, modality: Modality, payload: Payload) -> None:
        """A final stage gave something."""
        now = time.perf_counter()
        track = self._tracks.get(stage)
        if track is None:
            track = self._begin(stage, modality, now)
        elif track.last_at is not None:
            track.gaps.add(now - track.last_at)
        if type(payload) is Audio:
            self._play(track, payload, now)
        track.last_at = now

    def _play(self, track: Track, audio: Audio, now: float) -> None:
        if track.plays_until < now:
            if track.last_at is not None:
                self._metrics.underruns.labels(self._pipeline).inc()
            track.plays_until = now
        if not track.byte_rate:
            track.byte_rate = audio.format.frame_width * audio.format.sample_rate_hz
        seconds = len(audio.data) / track.byte_rate
        track.seconds += seconds
        track.plays_until += seconds

    def _begin(self, stage: str, modality: Modality, now: float) -> Track:
        elapsed = now - self._arrived_at
        if self.first_output_s is None:
            self.first_output_s = elapsed
        self._metrics.first_output.labels(self._pipeline, modality.value).add(elapsed)
        gaps = self._metrics.chunk_gap.labels(self._pipeline, modality.value)
        track = self._tracks[stage] = Track(gaps, now)
        return track

    def answered(self, stage: str) -> None:
        """The stage's answer is complete: until the next one begins, nothing is late."""
        if (track := self._tracks.get(stage)) is not None:
            track.last_at, track.turns = None, track.turns + 1

    def interrupted(self) -> None:
        """So is every stage's."""
        for stage in self._tracks:
            self.answered(stage)

    def ended(self) -> None:
        """The request ended well: how its sound kept up. Not of several answers, between which
        the client thinks."""
        for track in self._tracks.values():
            if track.seconds and not track.turns and track.last_at is not None:
                factor = (track.last_at - self._arrived_at) / track.seconds
                self._metrics.realtime_factor.labels(self._pipeline).add(factor)
