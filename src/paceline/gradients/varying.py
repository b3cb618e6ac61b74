"""The learning rate of a step whose count is not the global batch: with a deadline the count varies from step to step.

With n of B samples, S = n / B, an update may be scaled by

- ``none``: 1. The gradient is a mean over what arrived, and the rate stays.
- ``linear``: S. Every sample moves the parameters as far as in a whole batch.
- ``gain``: ``(v + m) / (v / S + m)`` as in AdaScale SGD, with v the variance of a whole batch's gradient and m the
  squared norm of its mean. Where noise rules it is linear, where the mean rules it is 1; it lies between them.

v and m are learned from every round: with g_i the mean gradient of worker i's n_i samples and g that of all n, both

    sum_i n_i |g_i|^2  =  n m + k s        |g|^2  =  m + s / n

hold in expectation for k workers and a per-sample variance s, so ``s = (sum_i n_i |g_i|^2 - n |g|^2) / (k - 1)``.
"""

from __future__ import annotations

from collections.abc import Mapping

RULES = ("none", "linear", "gain")
SMOOTHING = 0.1
"""Weight of the newest step in the running estimates."""


def gain(scale: float, variance: float, squared_mean: float) -> float:
    """Return AdaScale's gain for a batch ``scale`` times the usual one.

    >>> gain(0.5, variance=1.0, squared_mean=0.0), gain(0.5, variance=0.0, squared_mean=1.0), gain(1.0, 1.0, 1.0)
    (0.5, 1.0, 1.0)
    """
    if scale <= 0 or variance + squared_mean <= 0:
        return scale
    return (variance + squared_mean) / (variance / scale + squared_mean)


class VaryingCount:
    """The rule that scales updates. It is the same on every worker, for all see the same rounds."""

    def __init__(self, rule: str, usual: float) -> None:
        """Make the rule; ``usual`` is the weight of a whole batch."""
        if rule not in RULES:
            raise ValueError(f"the learning rate for a varying count can be {', '.join(RULES)}, not {rule!r}")
        if not usual > 0:
            raise ValueError(f"a whole batch weighs more than 0, not {usual}")
        self.rule, self.usual = rule, usual
        self._noise = self._signal = self._seen = 0.0

    @property
    def wants_norms(self) -> bool:
        """Whether the rule needs the norms of the workers' own gradients."""
        return self.rule == "gain"

    def learn(self, *, weighted_squares: float, squared_norm: float, weight: float, workers: int) -> None:
        """Learn from a round: ``sum_i n_i |g_i|^2``, ``|g|^2``, n, and the number of workers that had a part in it."""
        if workers < 2 or weight <= 0:
            return
        per_sample = max(0.0, (weighted_squares - weight * squared_norm) / (workers - 1))
        self._noise += SMOOTHING * (per_sample - self._noise)
        self._signal += SMOOTHING * (max(0.0, squared_norm - per_sample / weight) - self._signal)
        self._seen += SMOOTHING * (1.0 - self._seen)  # both start at 0: their ratio is not biased by it

    def factor(self, weight: float) -> float:
        """Return the factor for an update whose samples have this ``weight`` in all."""
        scale = weight / self.usual
        if self.rule == "none":
            return 1.0
        if self.rule == "linear" or self._seen == 0.0:
            return scale
        return gain(scale, self._noise / self.usual, self._signal)

    def state_dict(self) -> dict[str, float]:
        return {"noise": self._noise, "signal": self._signal, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._noise, self._signal, self._seen = state["noise"], state["signal"], state["seen"]
