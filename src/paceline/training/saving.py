"""Saving a training: when the script asks for it, and by itself between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import divided_folder
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint.autosave import Autosaver, Schedule
from paceline.checkpoint.divided_folder import TakenOut
from paceline.loop.sizing import saved_sizes
from paceline.settings import must_agree

if TYPE_CHECKING:
    from paceline.loop.steps import Steps
    from paceline.training.context import TrainingContext
    from paceline.training.replica import Replica
    from paceline.training.untracked import UntrackedChecks


class Saving:
    """Writes checkpoints where this worker leads."""

    def __init__(self, context: TrainingContext, replica: Replica, untracked: UntrackedChecks) -> None:
        self._context, self._replica, self._untracked = context, replica, untracked
        self._autosaver: Autosaver | None = None

    def save(self, path: Path, extra: Any) -> None:
        """``fleet.save``: all workers call it, the leader writes."""
        context = self._context
        with context.meet("fleet.save()"):
            facts = {**context.tracking.facts(), **context.tracking.values_facts()}
            must_agree(context.transport, "fleet.save()", facts)
            problem = context.transport.gather("fleet.save()", lambda: self._write(path, extra))[0]
        if problem:
            kind, text = problem
            raise OSError(text) if kind == "OSError" else ValueError(text)

    def _write(self, path: Path, extra: Any) -> list[str] | None:
        """The leader writes the checkpoint; returns what went wrong."""
        if not self._context.leads:  # nor does one that waits to enter
            return None
        transport = self._context.transport
        try:
            if transport.shards > 1:
                taken = TakenOut()
                divided_folder.write(path, self._content(extra, taken), taken.tensors, transport)
            else:
                checkpoint_file.write(path, self._content(extra))
        except OSError as error:
            return ["OSError", f"cannot write {path}: {error.strerror or error}"]
        except ValueError as error:
            return ["ValueError", f"fleet.save: {error}"]
        self._context.recorder.event("save", {"step": self._context.step, "path": str(path)})
        return None

    # -- by itself ---------------------------------------------------------------------------------------------------

    def autosave(self, folder: Path, *, schedule: Schedule, keep: int, extra: Any) -> None:
        """``fleet.autosave``: from now on, in place of what was asked for before."""
        autosaver = Autosaver(
            folder,
            schedule=schedule,
            keep=keep,
            leads=lambda: self._context.leads,
            writes=self._context.transport.shard == 0,
            agreed=lambda due: self._context.transport.once("automatic saving", lambda: due),
            content=lambda: self._shown_content(extra),
            observe=self._context.recorder.event,
        )
        self.close()
        self._autosaver = autosaver

    def at_boundary(self, steps: Steps) -> None:
        """Between two steps, the user's own code after a commit included."""
        if self._autosaver is not None and steps is self._context.steps:
            self._autosaver.boundary(steps.index, last=steps.finished)

    def before_leaving(self, steps: Steps) -> None:
        """This worker leaves: where automatic saving is on and it leads, the others may all be gone soon too."""
        if self._autosaver is not None and self._context.leads:
            self._autosaver.boundary(steps.index, last=True)
            if steps.membership is None or steps.membership.all_leave:  # nobody waits, and nobody else will tell of it
                self._autosaver.close()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._autosaver is not None:
            self._autosaver.close()

    # -- what is saved -----------------------------------------------------------------------------------------------

    @contextmanager
    def _shown_content(self, extra: Any) -> Iterator[dict[str, Any]]:
        steps = self._context.steps
        with steps.combine.shown() if steps is not None else nullcontext():
            yield self._content(extra() if callable(extra) else extra)

    def _content(self, extra: Any, take_out: TakenOut | None = None) -> dict[str, Any]:
        return {
            **self._replica.state(take_out),
            "steps": self._steps_state(),
            "pace": {"name": self._context.pacer.name, "state": self._pace_state()},
            "seed": self._context.seed,
            "extra": checkpoint.plain(extra, "extra"),
            "untracked": self._untracked.lacking(),
        }

    def _steps_state(self) -> dict[str, Any] | None:
        steps, resume, passes = self._context.steps, self._context.resume, self._context.passes
        if steps is None:
            return dict(resume.saved) if resume is not None else None
        state = steps.state_dict()
        passes.note(steps.place, steps.training.passes)
        return {
            **state,
            "dataset_length": steps.dataset_length,
            "loop": steps.place.loop,
            "data": steps.place.data,
            "epochs": steps.settings.epochs,
            "passes": passes.state_dict(),
            **({"sizes": sizes} if (sizes := saved_sizes(steps.loop)) is not None else {}),
        }

    def _pace_state(self) -> dict[str, Any]:
        steps = self._context.steps
        return self._context.pacer.state_dict() if steps is None else steps.pace_state()
