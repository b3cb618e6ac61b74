"""The pacers against traces and seeded scenarios: thousands of workers, no processes. See docs/simulate.md."""

from paceline.simulate.comparison import compare, compare_stuck
from paceline.simulate.outcome import Outcome, matrix
from paceline.simulate.scenarios import SCENARIOS, make

__all__ = ["SCENARIOS", "Outcome", "compare", "compare_stuck", "make", "matrix"]
