"""The steps of a training, one after another: plan, deal, work, round, commit.

The leader asks its pacer for the next step's plan before it starts to work on the present one, and the plan rides in
the present round: everybody holds the same plan and nobody waits for it. What a step did enters the feed, the history
and every worker's pacer at commit, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.combine import Gradients, Header
from paceline.combine.scaling import is_active
from paceline.dealing import Dealing
from paceline.errors import MisuseError, NonFiniteGradients
from paceline.pace import Ask, Pacer
from paceline.records import History, Plan, StepRecord
from paceline.replicas import fingerprint
from paceline.settings import LoopSettings, must_agree
from paceline.step import Step
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.machines import Machine

FINGERPRINT_EVERY = 100
"""Steps between two comparisons of the replicas' parameters."""


class Steps:
    """What ``fleet.steps`` returns: iterate it for steps; ``len`` is their number over all epochs."""

    def __init__(
        self,
        *,
        transport: Transport,
        pacer: Pacer,
        gradients: Gradients,
        dealing: Dealing,
        settings: LoopSettings,
        unit: int,
        avoid_singles: bool,
        seed: int,
        device: torch.device,
        machine: Machine | None,
        nonfinite: str,
        history: History,
        first_index: int,
        observe: Callable[[str, Mapping[str, Any]], None],
        repair: Callable[[], None],
    ) -> None:
        self.gradients, self.dealing, self.device, self.machine, self.seed = gradients, dealing, device, machine, seed
        self.settings, self.auto = settings, settings.auto
        self._transport, self._pacer, self._history = transport, pacer, history
        self._unit, self._avoid_singles, self._nonfinite = unit, avoid_singles, nonfinite
        self._observe, self._repair = observe, repair
        self.finished = self._closed = False
        self._index = first_index
        self._plan: Plan | None = None
        self._next_plan: Plan | None = None
        self._shares: tuple[int, ...] = ()
        self._full_shares: tuple[int, ...] = ()
        self._agreed_epoch = -1
        self._step: Step | None = None
        self._header: Header | None = None
        self._round_s = 0.0
        self._checked: set[int] = set()

    # -- the loop --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.dealing.length is None:
            raise TypeError("an iterable dataset does not say how many steps it makes")
        return -(-self.dealing.length // self.settings.global_batch) * self.settings.epochs

    def __iter__(self) -> Iterator[Step]:
        try:
            while not self.finished:
                self._step = self._begin()
                yield self._step
                self._require_committed()
        finally:
            self._transport.doing("after the last step")

    def _begin(self) -> Step:
        if self._closed:
            raise MisuseError("this loop has ended: a later fleet.steps took its place, or the fleet was left")
        began = time.perf_counter()
        self._transport.doing(f"step {self._index}")
        self._plan = self._plan or self._hand_round_plan()
        self._check_order()
        self._shares = self.dealing.deal(self._plan.samples)
        if sum(self._shares) == self.settings.global_batch:
            self._full_shares = self._shares
        self.gradients.begin(sum(self._shares))
        if self._transport.rank == 0 and len(self._history) > 0:
            self._next_plan = self._plan_next()
        ends = self.dealing.remaining is not None and sum(self._shares) >= self.dealing.remaining
        share = self._shares[self._transport.rank]
        return Step(self, index=self._index, epoch=self.dealing.epoch, share=share, ends_epoch=ends, began=began)

    def _check_order(self) -> None:
        """A custom order must be the same on every worker, or samples would be lost and doubled in silence."""
        if self._agreed_epoch == self.dealing.epoch:
            return
        self._agreed_epoch = self.dealing.epoch
        if (digest := self.dealing.order_digest()) is not None:
            must_agree(self._transport, f"order({self.dealing.epoch})", {"the order's digest": digest})

    def _require_committed(self) -> None:
        if self._step is not None and not self._step.committed:
            raise MisuseError(f"step {self._step.index} was not committed: call step.commit(optimizer) in every step")

    @property
    def begun(self) -> bool:
        """Whether the first step has been given out."""
        return self._step is not None

    @property
    def index(self) -> int:
        """The next step's index."""
        return self._index

    @property
    def progress(self) -> float:
        return 1.0 if self.finished else (self.dealing.epoch + self.dealing.progress) / self.settings.epochs

    @property
    def full_shares(self) -> tuple[int, ...]:
        """The shares of the last step of a whole global batch; empty before the first."""
        return self._full_shares

    # -- plans -----------------------------------------------------------------------------------------------------

    def _hand_round_plan(self) -> Plan:
        """The leader hands a plan round: for the first step and, since then there is something to know about the
        machines and equal shares may be very wrong for them, for the second too."""
        left = self.dealing.remaining
        total = self.settings.global_batch if left is None else min(self.settings.global_batch, left)
        mine = self._ask(self._index, self.dealing.epoch, total).to_json() if self._transport.rank == 0 else None
        return Plan.from_json(self._transport.gather("the plan of the first steps", mine)[0])

    def _plan_next(self) -> Plan | None:
        """The plan after the present one, supposing that what is planned gets done."""
        epoch, left = self.dealing.epoch, self.dealing.remaining
        if left is None:
            return self._ask(self._index + 1, epoch, self.settings.global_batch)
        left -= sum(self._shares)
        if left == 0:
            epoch, next_length = epoch + 1, self.dealing.next_length
            left = self.settings.global_batch if next_length is None else next_length
        if epoch >= self.settings.epochs:
            return None
        return self._ask(self._index + 1, epoch, min(self.settings.global_batch, left))

    def _ask(self, step: int, epoch: int, total: int) -> Plan:
        if self._transport.size == 1:
            return Plan(generation=self._transport.generation, step=step, samples=(total,))
        ask = Ask(
            step=step,
            total=total,
            workers=self._transport.workers,
            epoch=epoch,
            generation=self._transport.generation,
            unit=min(self._unit, total),
        )
        plan = self._pacer.plan(ask)
        return without_singles(plan) if self._avoid_singles else plan

    # -- the round -------------------------------------------------------------------------------------------------

    def exchange(self, step: Step, added: Mapping[str, Any], clip_norm: float | None) -> bool:
        """Run the step's round; True when there is a gradient to apply, which then is in ``p.grad``."""
        finite = self.gradients.finish()
        header = self._write_header(step, added, finite)
        entered = time.perf_counter()
        self.gradients.exchange(header, step.samples, f"the round of step {step.index}")
        waited = time.perf_counter() - entered
        self._round_s = max(0.0, waited - float(header.column("seconds").max() - step.seconds))
        self._header = header
        apply = self._may_apply(step, header)
        if apply:
            self.gradients.mean(header, clip_norm)
        step.record = self._record(step, header, apply)
        return apply

    def _write_header(self, step: Step, added: Mapping[str, Any], finite: bool) -> Header:
        header = Header(self.gradients.layout)
        overflow = not finite and is_active(self.gradients.scaler)
        header.write(
            self._transport.rank,
            samples=step.samples,
            weight=float(step.weight),
            loss=float(step.loss_sum),
            seconds=step.seconds,
            micro_batches=step.micro_batches,
            slowest_s=step.slowest_s,
            shortfall_s=step.shortfall_s,
            overflow=overflow,
            nonfinite=not finite and not overflow,
            ended=self.dealing.ended or step.share == 0,
            fingerprint=self._fingerprint(step.index),
        )
        for name, value in added.items():
            header.add(self._transport.slot(name), float(value))
        if self._next_plan is not None:
            header.write_plan(self._next_plan)
        return header

    def _may_apply(self, step: Step, header: Header) -> bool:
        bad = np.flatnonzero(header.column("nonfinite"))
        if bad.size and self._nonfinite == "stop":
            raise NonFiniteGradients(self._nonfinite_text(step, header, bad.tolist()))
        if bad.size:
            self._warn_all(self._nonfinite_text(step, header, bad.tolist()))
        return not bad.size and not header.column("overflow").any() and bool(header.column("weight").sum() > 0)

    def _nonfinite_text(self, step: Step, header: Header, workers: list[int]) -> str:
        losses = header.column("loss")[workers]
        who = " and ".join(f"worker {worker}" for worker in workers)
        loss = "its loss was finite" if np.isfinite(losses).all() else "the loss itself was NaN or infinite"
        said = f"{who} had NaN or infinite gradients in step {step.index} ({loss})"
        if self._nonfinite == "skip":
            return f"{said}: the update was skipped"
        skip = 'paceline.join(nonfinite="skip") leaves such steps out'
        return f"{said}: stopped before the update. {skip}; a GradScaler must be tracked with fleet.track(scaler=...)"

    def _record(self, step: Step, header: Header, applied: bool) -> StepRecord:
        assert self._plan is not None
        weight = float(header.column("weight").sum())
        return StepRecord(
            step=step.index,
            epoch=step.epoch,
            generation=self._transport.generation,
            workers=self._transport.workers,
            planned=self._shares,
            samples=_ints(header.column("samples")),
            seconds=tuple(header.column("seconds").tolist()),
            micro_batches=_ints(header.column("micro_batches")),
            slowest_s=tuple(header.column("slowest_s").tolist()),
            late_s=tuple(header.column("late_s").tolist()),
            forecast_s=self._plan.forecast_s,
            deadline_s=self._plan.deadline_s,
            round_s=self._round_s,
            weight=weight,
            loss=float(header.column("loss").sum()) / weight if weight else None,
            grad_norm=self.gradients.known_norm if applied else None,
            applied=applied,
            sums={self._transport.slot_name(slot): value for slot, value in header.sums().items()},
            shortfall_s=tuple(header.column("shortfall_s").tolist()) if self.machine else (),
        )

    # -- the commit ------------------------------------------------------------------------------------------------

    def commit(self, step: Step) -> None:
        """Everything that a step changes, changes here: feed, history, pacer, plan."""
        header, record = self._header, step.record
        assert header is not None
        assert record is not None
        self.gradients.clear(overflow=bool(header.column("overflow").any()))
        ranges = self.dealing.commit(record.samples, bool(header.column("ended").all()))
        step.ends_epoch = self.dealing.remaining == 0  # a stream's end shows only now
        record = replace(record, ranges=ranges, wall_s=time.perf_counter() - step.began)
        step.record = record
        self._history.append(record)
        if self._transport.size > 1:  # a worker alone has nothing to divide
            self._pacer.observe(record)
        self._observe("step", vars(record))
        self._index += 1
        self._plan, self._next_plan = header.read_plan(), None
        if self.dealing.remaining == 0:
            self._open(self.dealing.epoch + 1)
        self._compare_replicas(header)
        self._transport.doing(f"its own code after step {step.index}")

    def _open(self, epoch: int) -> None:
        """Open an epoch or, beyond the last, finish."""
        self.finished = epoch >= self.settings.epochs
        if not self.finished:
            self.dealing.open(epoch)

    def grad_norm(self, step: Step) -> float:
        if step is not self._step or step.record is None:
            raise MisuseError(
                f"the gradients of step {step.index} are no longer there: ask before the next step begins"
            )
        return self.gradients.norm() if step.applied else float("nan")

    # -- watchfulness ----------------------------------------------------------------------------------------------

    def _fingerprint(self, index: int) -> float:
        due = self._transport.size > 1 and index % FINGERPRINT_EVERY == 0
        return fingerprint(self.gradients.everything) if due else 0.0

    def _compare_replicas(self, header: Header) -> None:
        prints = header.column("fingerprint")
        if (prints == prints[0]).all():
            return
        astray = np.flatnonzero(prints != prints[0]).tolist()
        text = (
            f"the parameters of workers {astray} were not equal to worker 0's and were set to them: unlike devices "
            "round differently, and anything that changes parameters outside step.commit shows here too"
        )
        self._warn_all(text)
        self._repair()

    def _warn_all(self, text: str) -> None:
        """A warning that every worker has: the leader's is enough."""
        self._observe("note", {"level": "warning", "text": text, "everywhere": True})

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimiser of parameters that are not the fleet's would let replicas drift apart."""
        for optimizer in optimizers:
            if id(optimizer) in self._checked:
                continue
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(f"step.commit takes optimizers, got {type(optimizer).__name__}")
            ours = {id(parameter) for parameter in self.gradients.everything}
            groups = (group["params"] for group in optimizer.param_groups)
            if any(id(parameter) not in ours for group in groups for parameter in group):
                raise ValueError(
                    "the optimizer has parameters that are not in fleet.model(...): build it from the module that "
                    "fleet.model returns"
                )
            self._checked.add(id(optimizer))

    def pad(self, index: int, samples: int, started: float) -> float:
        """Take as long as the emulated machine would; returns the seconds by which the host was too slow."""
        assert self.machine is not None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.machine.pad(index, samples, started)

    def shrink(self, samples: int, *, again: bool) -> bool:
        """Memory ran out with so many samples at once: use at most half as many from here on."""
        if not self.dealing.shrink(samples // 2, again=again):
            return False
        text = f"worker {self._transport.rank} ran out of memory with {samples} samples at once: "
        self._observe("note", {"level": "warning", "text": text + f"micro_batch is now {self.dealing.micro_batch}"})
        return True

    def require_current(self, step: Step) -> None:
        """A step of a loop that was left must not go on: its samples are no longer its own."""
        if self._closed or step is not self._step:
            raise MisuseError(f"step {step.index} is over: its loop was left, or a later step has begun")

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._index,
            "epoch": self.settings.epochs if self.finished else self.dealing.epoch,
            "dealing": None if self.finished else self.dealing.state_dict(),
            "gradients": self.gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._index = state["step"]
        self.gradients.load_state_dict(state["gradients"])
        if state["dealing"] is None or state["epoch"] >= self.settings.epochs:
            self._open(state["epoch"])  # an epoch was over
        else:
            self.dealing.load_state_dict(state["dealing"])

    def close(self, *, orderly: bool = True) -> None:
        """End the loop. ``orderly``: not because of an error, which would have said enough."""
        if self._closed:
            return
        self._closed = True
        if orderly and self._step is not None and not self._step.committed:
            text = f"the loop was left in step {self._step.index}, before its commit: its samples were not counted"
            self._warn_all(text)
        self.dealing.close()
        self.gradients.detach()


def without_singles(plan: Plan) -> Plan:
    """Move shares of one sample to the largest share: batch norm cannot train on a single one.

    >>> without_singles(Plan(generation=0, step=0, samples=(7, 1, 4))).samples
    (8, 0, 4)
    """
    if plan.total < 2 or 1 not in plan.samples:
        return plan
    samples = [0 if share == 1 else share for share in plan.samples]
    samples[int(np.argmax(samples))] += plan.total - sum(samples)
    return replace(plan, samples=tuple(samples))


def _ints(column: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, ...]:
    return tuple(int(value) for value in column)
