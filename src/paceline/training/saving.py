"""Saving a training: on the script's request, and automatically between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import file as checkpoint_file
from paceline.checkpoint import shards
from paceline.checkpoint.autosave import Autosaver, Schedule
from paceline.checkpoint.shards import TakenOut
from paceline.errors import MisuseError
from paceline.settings import must_agree
from paceline.step.micro_batch_size import saved_sizes

if TYPE_CHECKING:
    from paceline.step.steps import StepLoop
    from paceline.training.context import TrainingContext
    from paceline.training.replica import Replica
    from paceline.training.untracked import UntrackedChecks


class Saving:
    """Writer of checkpoints where this worker leads."""

    def __init__(self, context: TrainingContext, replica: Replica, untracked: UntrackedChecks) -> None:
        self._context, self._replica, self._untracked = context, replica, untracked
        self._autosaver: Autosaver | None = None

    def save(self, path: Path, extra: Any) -> None:
        """Run ``fleet.save``: all workers call it, the leader writes."""
        context = self._context
        self._refuse_within_update()
        with context.meet("fleet.save()"):
            facts = {**context.tracking.facts(), **context.tracking.values_facts()}
            must_agree(context.transport, "fleet.save()", facts)
            problem = context.transport.gather("fleet.save()", lambda: self._write(path, extra))[0]
        _raise(problem)

    def save_on_leader(self, path: Path, extra: Any) -> None:
        """Write between two steps where this worker leads, without waiting for others, who need not call it.

        After a commit all replicas are equal. Only for fleets of fixed size: a leader that is lost while it writes
        leaves no file.
        """
        self._refuse_within_update()
        steps = self._context.steps
        with steps.combine.shown() if steps is not None else nullcontext():
            _raise(self._write(path, extra))

    def _refuse_within_update(self) -> None:
        """Raise MisuseError between a step's round and its commit: the update may be made, and is not counted yet."""
        steps = self._context.steps
        step = None if steps is None or steps.left else steps.loop.position.step
        if step is not None and step.record is not None and not step.committed:
            raise MisuseError(
                f"fleet.save between step.reduce() and step.commit() of step {step.index}: a run that resumes would "
                "make its update twice; save behind step.commit"
            )

    def _write(self, path: Path, extra: Any) -> list[str] | None:
        """Write the checkpoint on the leader; return what went wrong."""
        if not self._context.leads:  # a worker that waits to enter does not lead either
            return None
        transport = self._context.transport
        try:
            if transport.shards > 1:
                taken = TakenOut()
                shards.write_folder(path, self._content(extra, taken), taken.tensors, transport)
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
        """Start ``fleet.autosave``, in place of an earlier one."""
        autosaver = Autosaver(
            folder,
            schedule=schedule,
            keep=keep,
            leads=lambda: self._context.leads,
            writes=self._context.transport.shard == 0,
            agreed=lambda due: self._context.transport.once("automatic saving", lambda: due),
            content=lambda: self._shown_content(extra),
            log_event=self._context.recorder.event,
        )
        self.close()
        self._autosaver = autosaver

    def save_if_due(self, steps: StepLoop) -> None:
        """Save if it is due, between two steps, after the user's own code that follows a commit."""
        if self._autosaver is not None and steps is self._context.steps:
            self._autosaver.boundary(steps.index, last=steps.finished)

    def before_leaving(self, steps: StepLoop) -> None:
        """Save before this worker leaves, if automatic saving is on and it leads: the others may leave soon too."""
        if self._autosaver is not None and self._context.leads:
            self._autosaver.boundary(steps.index, last=True)
            if steps.membership is None or steps.membership.all_leave:  # no worker waits, and no other will report
                self._autosaver.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
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
        passes.note(steps.script_loop, steps.training.passes)
        return {
            **state,
            "dataset_length": steps.dataset_length,
            "loop": steps.script_loop.number,
            "data": steps.script_loop.dataset,
            "epochs": steps.settings.epochs,
            "passes": passes.state_dict(),
            **({"sizes": sizes} if (sizes := saved_sizes(steps.loop)) is not None else {}),
        }

    def _pace_state(self) -> dict[str, Any]:
        steps = self._context.steps
        return self._context.pacer.state_dict() if steps is None else steps.pace_state()


def _raise(problem: Sequence[str] | None) -> None:
    if problem:
        kind, text = problem
        raise OSError(text) if kind == "OSError" else ValueError(text)
