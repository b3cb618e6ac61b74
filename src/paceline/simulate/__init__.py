"""The simulator: pacers played against traces and seeded scenarios of thousands of workers, without processes.

See docs/research.md.
"""

from paceline.simulate.comparison import compare, compare_stuck
from paceline.simulate.matrices import SCENARIOS, make
from paceline.simulate.play import Outcome, matrix

__all__ = ["SCENARIOS", "Outcome", "compare", "compare_stuck", "make", "matrix"]
