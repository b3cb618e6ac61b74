"""What a fleet's rounds cost on its links, and what a rule made of that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from paceline.machines.link import Link


class RoundCosts(Protocol):
    """What a rule needs to know of a network."""

    @property
    def workers(self) -> int: ...

    @property
    def sent_bytes(self) -> float: ...

    @property
    def average_s(self) -> float: ...


@dataclass(frozen=True)
class Network:
    """A fleet's links and what its rounds carry."""

    link: Link
    workers: int
    model_bytes: int

    @property
    def sent_bytes(self) -> float:
        """What each worker sends in a round, and as much is received: ``2 (n - 1) / n * B``."""
        return 2 * (self.workers - 1) / self.workers * self.model_bytes

    @property
    def gradients_s(self) -> float:
        """A round of gradients: one sum."""
        return self.link.seconds(self.model_bytes, workers=self.workers)

    @property
    def average_s(self) -> float:
        """A round of parameters: the table of facts, whose bytes are next to nothing, and then the sum."""
        return self.link.seconds(0, workers=self.workers) + self.gradients_s


@dataclass(frozen=True)
class Traffic:
    """What a rule did over its scored rounds."""

    name: str
    workers: int
    rounds: int
    samples: float
    seconds: float
    rounds_s: float
    """Seconds of these in which the round was under way."""
    waiting_s: float
    """Seconds workers stood idle until a round began, summed over workers."""
    sent_bytes: float
    """Sent by each worker, in all rounds."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def in_rounds(self) -> float:
        """Part of the time spent in rounds."""
        return self.rounds_s / self.seconds

    @property
    def waiting(self) -> float:
        """Part of all worker-seconds spent waiting for a round to begin."""
        return self.waiting_s / (self.workers * self.seconds)

    @property
    def bytes_per_sample(self) -> float:
        """Sent by the whole fleet for one sample."""
        return self.workers * self.sent_bytes / self.samples

    @property
    def sent_per_s(self) -> float:
        """Bytes a second that each worker sends, on average over work and rounds."""
        return self.sent_bytes / self.seconds

    @property
    def round_every_s(self) -> float:
        """Seconds from one round to the next; infinite where there are none."""
        return self.seconds / self.rounds if self.rounds else math.inf
