"""How the fleet's work merges."""

from paceline.combine.gradients.gradients import Gradients
from paceline.combine.header import Header

NAMES = ("gradients", "average", "elastic-average")

__all__ = ["NAMES", "Gradients", "Header"]
