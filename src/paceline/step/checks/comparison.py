"""Comparison of the replicas while they train: now and then, in the header of a round that all have waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import MisuseError
from paceline.gradients import Header
from paceline.step.checks.replicas import likely_causes
from paceline.step.checks.sameness import unlike_modes, unlike_text
from paceline.step.step_state import StepState
from paceline.step.training_state import differ

if TYPE_CHECKING:
    from paceline.step.context import LoopContext

COMPARE_EVERY = 100
"""Steps between two comparisons of the replicas' parameters, and how long a repair must hold."""
COMPARE_EARLY = (1, 2, 4, 8, 16, 32, 64)
"""Steps at which replicas are compared too: what parts them mostly does so from the beginning."""


def is_examined(step: int) -> bool:
    """Return whether workers compare more than usual in this step."""
    return step % COMPARE_EVERY == 0 or step in COMPARE_EARLY


class ReplicaComparison:
    """The comparison of replicas now and then.

    A run whose replicas differ is stopped; where unlike devices round differently, they are made equal.
    """

    def __init__(self, loop: LoopContext) -> None:
        self._loop = loop

    def fingerprint(self, step_state: StepState) -> float:
        """Return a fingerprint of what this worker holds, in steps in which replicas are compared; else 0."""
        regular = step_state.index % COMPARE_EVERY == 0 or (self._loop.replica.alike and is_examined(step_state.index))
        due = self._loop.transport.size > 1 and (regular or step_state.compare)
        self._loop.gradients.accumulation.asks_modes = due
        if due:
            self._loop.gradients.accumulation.buffers.note_contents()
        if not due or self._loop.position.compared == step_state.index:
            return 0.0
        return 1.0 + self._loop.replica.contents().number(self._loop.transport)

    def refuse(self, step: int, header: Header) -> None:
        """Raise MisuseError, before an update that all have waited for, where workers do not hold the same.

        Compared are the contents of workers with like devices (unlike ones round differently, see `repair`) and which
        modules are in evaluation mode.
        """
        loop = self._loop
        if loop.replica.alike and differ(header):
            everybody = loop.transport.gather("comparing replicas", lambda: loop.replica.contents().by_name())
            causes = likely_causes(loop.tracking.missing())
            raise MisuseError(
                unlike_text(everybody, when=f"in step {step}", causes=causes)
                or f"workers did not hold the same when step {step} began"
            )
        if differ(header, "modes"):
            everybody = loop.transport.gather("comparing modes", loop.gradients.accumulation.evaluating)
            if text := unlike_modes(everybody, step=step):
                raise MisuseError(text)

    def repair(self, step: int, header: Header) -> None:
        """Make replicas equal, after a round that all have waited for, that unlike devices have rounded apart."""
        if not differ(header):
            return
        found = self._loop.replica.repair()
        self._loop.gradients.statistics_were_set()
        text = found.text(step, missing=self._loop.tracking.missing())
        if not found.harmless:
            raise MisuseError(text)
        self._loop.notes.warn_all(f"{text}. Parameters and everything tracked were set to worker 0's")
