"""How the fleet's work merges."""

from paceline.combine.gradients.gradients import Gradients
from paceline.combine.header import Header

__all__ = ["Gradients", "Header"]
