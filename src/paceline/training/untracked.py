"""Objects that the script uses and does not track: they would begin anew in a resumed run, or on a worker that joins.

They are searched where that would happen: at the first step of a loop, before and after a checkpoint is loaded, and
when one is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.load import Found
from paceline.errors import MisuseError
from paceline.step.tracking import Living

if TYPE_CHECKING:
    from paceline.step.steps import StepLoop
    from paceline.training.context import TrainingContext


class UntrackedChecks:
    """Checks that refuse, or warn of, what is not tracked and should be."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._last_search: tuple[Any, list[str]] = (None, [])
        """Objects tracked and the script's progress when a checkpoint was last written; and the objects not tracked."""
        self._loaded: tuple[str, int | None] | None = None
        """The last checkpoint that was loaded, and the first loop that made steps since."""

    # -- in a loop ---------------------------------------------------------------------------------------------------

    def before_first_step(self, steps: StepLoop) -> None:
        """Check before a loop's first step, by which the script has brought all that may be handed over."""
        if steps.combine.hands_over_state:
            living = Living()
            self._context.tracking.note_averages(living)
            self._check(steps, living)
        elif len(self._context.passes.lengths) < 2:
            self._context.tracking.note_averages(Living(AveragedModel))

    def after_first_step(self, steps: StepLoop) -> None:
        """Check after the first step, which shows what it used."""
        self._check(steps, Living())

    def _check(self, steps: StepLoop, living: Living) -> None:
        self._refuse_begun_anew(steps, living)
        if not steps.combine.hands_over_state:
            return
        elastic = self._context.elastic is not None
        missing = self._context.tracking.missing(living, optimizers=not elastic)
        # An optimiser that has not stepped yet may still do so: a copy is not safe then.
        steps.loop.script.copyable = not missing
        if missing and elastic:
            raise MisuseError(
                "a worker that joins could not take over the state of what is not tracked: call "
                f"fleet.track({', '.join(missing)}) before the first step, with your own objects"
            )

    def at_the_end(self, steps: StepLoop) -> None:
        """Check when the script leaves the fleet after this loop."""
        self._refuse_begun_anew(steps, Living())

    def _refuse_begun_anew(self, steps: StepLoop, living: Living) -> None:
        """Raise MisuseError if a checkpoint was loaded and the script uses what it does not track.

        What a later loop makes for itself may be new; an average of the weights seldom is.
        """
        if self._loaded is None:
            return
        path, first = self._loaded[0], steps.script_loop.number if self._loaded[1] is None else self._loaded[1]
        self._loaded = path, first
        missing = self._context.tracking.missing(living)
        missing = [name for name in missing if first == steps.script_loop.number or name.startswith("ema=")]
        if missing:
            raise _begun_anew(path, missing)

    # -- around a checkpoint -----------------------------------------------------------------------------------------

    def before_load(self, path: str | Path) -> None:
        """Raise MisuseError, or warn, before loading: what is not tracked would begin anew."""
        context, living = self._context, Living()
        # The first update of a living average shows whether it belongs to this training.
        context.tracking.note_averages(living)
        missing = context.tracking.missing(living, optimizers=True)
        if not missing:
            return
        text = f"fleet.load({str(path)!r}) does not give back the state of what is not tracked"
        advice = f"call fleet.track({', '.join(missing)}) before it, with your own objects"
        if context.steps is None or not context.steps.begun:
            raise MisuseError(f"{text}: {advice}")
        context.warn(f"{text}, which stays as it is now: {advice}, if the training is to go on from there")

    def after_fetch(self, path: str | Path, found: Found) -> None:
        """Raise MisuseError if the checkpoint lacks an average of the weights, which would begin anew.

        Which averages belong to this training shows in their updates alone, and there may be none after loading.
        """
        lacks = any(name.startswith("ema=") for name in found.content.get("untracked", ()))
        if lacks and (averages := self._context.tracking.averages()):
            raise _begun_anew(str(found.path), averages)
        self._loaded = str(path), None

    def lacking(self) -> list[str]:
        """Return what a checkpoint that is written now lacks, because it is not tracked; warn of it once."""
        context = self._context
        over = context.steps is not None and context.steps.finished
        now = (tuple(context.tracking.things), min(2, len(context.passes.lengths)), over)
        if self._last_search[0] == now:
            return self._last_search[1]
        before, missing = self._last_search[1], context.tracking.missing()
        self._last_search = now, missing
        if missing and missing != before:
            context.warn(
                "the checkpoint does not hold the state of what is not tracked, which a run that goes on from it would "
                f"begin anew: call fleet.track({', '.join(missing)}) with your own objects"
            )
        return missing


def _begun_anew(path: str, missing: Sequence[str]) -> MisuseError:
    return MisuseError(
        f"fleet.load({path!r}) did not give back the state of what is not tracked, and it began anew: call "
        f"fleet.track({', '.join(missing)}) with your own objects, before fleet.load; if they are meant to begin anew, "
        "make and track them after it"
    )
