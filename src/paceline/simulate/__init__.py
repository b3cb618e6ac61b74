"""The simulator: pacers played against traces and seeded scenarios of thousands of workers, without processes.

See docs/research.md.
"""

from paceline.simulate.comparison import compare, compare_stuck
from paceline.simulate.play import Outcome, matrix
from paceline.simulate.scenarios import SCENARIOS, make

__all__ = ["SCENARIOS", "Outcome", "compare", "compare_stuck", "make", "matrix"]
