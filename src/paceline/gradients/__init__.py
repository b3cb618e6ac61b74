"""The gradients of a fleet: from a worker's micro-batches to the mean over all workers."""

from paceline.gradients.gradients import Gradients
from paceline.gradients.header import Header

__all__ = ["Gradients", "Header"]
