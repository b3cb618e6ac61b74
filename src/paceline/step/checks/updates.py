"""The updates of optimisers: where they may step, and with what settings.

They may step inside ``step.commit``, or once between ``step.reduce()`` and a plain commit. torch calls hooks before and
after every ``optimizer.step()`` in the process. `UpdateGuard` looks at those whose optimiser holds parameters of the
fleet's models, while a loop over the fleet's steps is under way, and refuses what a step does not allow before it
changes a parameter. Steps outside of a loop are none of its concern. An optimiser that calls another one's ``step`` in
its own (Lookahead, SAM) makes one update.

Other parameters that an optimiser updates in a loop are each worker's own: they must get no gradient from the losses of
``step.backward``, which shows in their ``p.grad``.

The settings of the parameter groups must be the same on every worker: a `Digest` of them is compared in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline import concurrency
from paceline.checkpoint.shards import local
from paceline.errors import MisuseError
from paceline.gradients.header import number_of
from paceline.step.checks.user_code import refuse_closures

PROBED = 4096
"""Elements of each parameter that are compared to find an update by hand."""
IDLE_STEPS = 2
"""Steps without an update at the beginning of a loop that are refused: a first learning rate may be 0."""


class UpdatePhase(Enum):
    """The position of the user's loop, as far as updates are concerned."""

    OUTSIDE = "no loop is under way"
    BETWEEN = "after a commit, before the next step"
    WORKING = "in a step, before its round"
    COMBINED = "after the round that step.reduce() ran"
    COMMITTING = "inside step.commit"


class UpdateGuard:
    """Follows the updates of one fleet's parameters.

    ``ours`` returns the fleet's parameters; ``stepped`` is called after each step of an optimiser that holds some.
    """

    def __init__(self, ours: Callable[[], Iterable[torch.Tensor]], stepped: Callable[[Optimizer], None]) -> None:
        self._ours, self._stepped = ours, stepped
        self._known: WeakKeyDictionary[Optimizer, _Holdings] = WeakKeyDictionary()
        self._outside: dict[int, _Outside] = {}
        """Parameters that are not the fleet's, of optimisers that step in the loop, by ``id``."""
        self._loop: object | None = None
        self._phase, self._step = UpdatePhase.OUTSIDE, 0
        self._thread: object = None
        """The thread of the loop."""
        self._running: list[Optimizer] = []
        """Optimisers whose ``step`` is under way, the outermost first."""
        self._made: dict[int, Optimizer] = {}
        """Those that have made their update in this step, by ``id``."""
        self._summed: set[int] = set()
        """The parameters, by ``id``, whose gradients this loop sums: one that a model gets later is not among them."""
        self._last: tuple[int, int] | None = None
        """The last step that was applied, and how many updates were made in it."""
        self._applied = False
        self._trains = False
        """Whether an update was seen in this loop."""
        self._fed = False
        """Whether an optimiser stepped with gradients in this step."""
        self._before_update: _Probe | None = None
        self._idle_steps = 0
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def close(self) -> None:
        """Let go of torch's hooks."""
        self._phase = UpdatePhase.OUTSIDE
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Look at every optimiser anew: models or parameter groups may have been added."""
        self._known.clear()

    def _holdings(self, optimizer: Optimizer) -> _Holdings:
        held = list(_parameters(optimizer))
        ids, found = hash(tuple(map(id, held))), self._known.get(optimizer)
        if found is None or found.ids != ids:
            ours, name = {id(one) for one in self._ours()}, type(optimizer).__name__
            summed = self._summed or ours
            others = {id(one): _Outside(ref(one), name) for one in held if id(one) not in summed}
            found = self._known[optimizer] = _Holdings(ids, any(id(one) in ours for one in held), others)
        return found

    # -- parameters outside of the fleet -----------------------------------------------------------------------------

    def gradients_outside(self) -> list[tuple[_Outside, tuple[int, int]]]:
        """Return the parameters that optimisers of the loop update beside the fleet's, and their gradients' states."""
        return [(one, one.state()) for one in self._outside.values()] if self._outside else []

    def check_outside(self, before: Sequence[tuple[_Outside, tuple[int, int]]]) -> None:
        """Raise MisuseError when a backward since has given some of these parameters a gradient."""
        for one, state in before:
            if one.state() != state:
                raise MisuseError(self._reached(one))

    # -- how far the loop is -----------------------------------------------------------------------------------------

    def begin(self, loop: object, step: int, summed: Sequence[torch.Tensor] = ()) -> None:
        """Begin a step of this loop, which sums the gradients of the parameters ``summed``."""
        if loop is not self._loop:
            self._loop, self._trains, self._idle_steps, self._last = loop, False, 0, None
            self._summed = {id(one) for one in summed}
            self._outside = {key: one for key, one in self._outside.items() if key not in self._summed}
            self._known.clear()
        self._enter(UpdatePhase.WORKING)
        self._thread = concurrency.current_thread()
        self._step, self._applied, self._fed, self._before_update = step, False, False, None
        self._made.clear()

    def combined(self, applied: bool, parameters: Sequence[torch.Tensor]) -> None:
        """``step.reduce()`` has run the round of the step; ``applied``: it gave a gradient."""
        self._enter(UpdatePhase.COMBINED)
        self._applied = applied
        if applied and not self._trains:
            self._before_update = _Probe(parameters)

    def committing(self, applied: bool) -> None:
        """``step.commit`` is about to call its optimisers."""
        # Without a step.reduce() before it, it has just run the round: nobody can have come between.
        self._fed = self._fed or self._phase is not UpdatePhase.COMBINED
        self._enter(UpdatePhase.COMMITTING)
        self._applied = applied

    def updated(self) -> None:
        """Note that the step's update is made; raise MisuseError when none was made since the loop began."""
        self._last = (self._step, len(self._made)) if self._applied else None
        if self._trains or not self._applied:
            return
        probe = self._before_update
        if self._fed or (probe is not None and probe.moved(touched=not self._made)):
            self._trains = True
        else:
            self._idle_steps += 1
            if self._idle_steps >= IDLE_STEPS:
                raise MisuseError(self._no_update())
        self._before_update = None

    def committed(self, finished: bool) -> None:
        """Note that the step is over; ``finished``: so is the loop."""
        self._enter(UpdatePhase.OUTSIDE if finished else UpdatePhase.BETWEEN)

    def end(self, loop: object) -> None:
        """This loop is over, or was left."""
        if loop is self._loop:
            self._enter(UpdatePhase.OUTSIDE)

    def _enter(self, phase: UpdatePhase) -> None:
        self._phase = phase
        self._running.clear()  # an update that raised has not come to its end

    def reported(self, step: int) -> float:
        """Return one more than the number of updates in the step before ``step``; 0 where it is not known."""
        return 1.0 + self._last[1] if self._last is not None and self._last[0] == step - 1 else 0.0

    # -- torch's hooks -----------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._phase is UpdatePhase.OUTSIDE:
            return
        held = self._holdings(optimizer)
        if held.others and concurrency.current_thread() is self._thread:  # another loop may be on another thread
            self._outside |= held.others
        if not held.ours:
            return
        if id(optimizer) in self._made:
            raise MisuseError(self._twice(optimizer))
        if not self._running:
            self._check(optimizer)
        self._running.append(optimizer)

    def _check(self, optimizer: Optimizer) -> None:
        """Note that an update begins."""
        if self._phase is UpdatePhase.WORKING:
            raise MisuseError(self._too_early(optimizer))
        if self._phase is UpdatePhase.BETWEEN:
            raise MisuseError(self._too_late(optimizer))
        if self._phase is UpdatePhase.COMBINED:
            refuse_closures(optimizer)
        if not self._trains and not self._fed:
            probe = self._before_update
            look = probe is not None and probe.nonzero and not torch.compiler.is_compiling()
            self._fed = _has_gradient(_parameters(optimizer), nonzero=look)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # In a loop `_before` has just looked at what it holds.
        held = None if self._phase is UpdatePhase.OUTSIDE else self._known.get(optimizer)
        if not (held or self._holdings(optimizer)).ours:
            return
        self._stepped(optimizer)
        if self._running and self._running[-1] is optimizer:
            self._running.pop()
            if not self._running:
                self._made[id(optimizer)] = optimizer

    # -- messages ---------------------------------------------------------------------------------------------------

    def _twice(self, optimizer: Optimizer) -> str:
        name = type(optimizer).__name__
        if self._phase is UpdatePhase.COMMITTING:
            return (
                f"step.commit(optimizer) of step {self._step} would make a second update: {name} has stepped already, "
                "since step.reduce(). Leave optimizer.step() out, or write step.commit() without the optimizer"
            )
        if self._phase is UpdatePhase.BETWEEN:
            return self._too_late(optimizer)
        return (
            f"{name} stepped twice in step {self._step}: a step has one update. Call optimizer.step() once between "
            "step.reduce() and step.commit(), or write step.commit(optimizer), which calls it"
        )

    def _too_early(self, optimizer: Optimizer) -> str:
        name = type(optimizer).__name__
        if torch._C._current_graph_task_id() != -1:
            return (
                f"an optimiser that steps in register_post_accumulate_grad_hook ({name}) would update from one "
                "micro-batch of one worker: remove the hooks, and give step.commit an optimizer of all parameters"
            )
        return (
            f"{name} stepped in the middle of step {self._step}, before its round, from this worker's gradients alone: "
            "leave optimizer.step() out, step.commit(optimizer) makes the update"
        )

    def _too_late(self, optimizer: Optimizer) -> str:
        return (
            f"{type(optimizer).__name__} stepped after the commit of step {self._step}, which has made the update and "
            "cleared the gradients: leave optimizer.step() out. For an update of your own write step.reduce(); "
            "optimizer.step(); step.commit()"
        )

    def _no_update(self) -> str:
        cleared = bool(self._made)
        why = "the gradients were cleared between the round and the update" if cleared else "no optimizer stepped"
        return (
            f"step {self._step} and the one before ended without an update: {why}, and no parameter has changed. "
            "Write step.commit(optimizer), or step.reduce(); optimizer.step(); step.commit(), without zero_grad "
            "between. "
            "Where no update is wanted, commit an optimizer with lr=0"
        )

    def _reached(self, one: _Outside) -> str:
        parameter = one.parameter()
        shape = "" if parameter is None else f" of shape {list(parameter.shape)}"
        return (
            f"{one.optimizer} steps in the loop and holds a parameter{shape} that the loss reaches and the fleet was "
            "not given, so every worker would train its own from its own samples: give its module to the fleet before "
            "the first step, criterion = fleet.model(criterion), and its optimizer to step.commit; or detach() it in "
            "the loss. A layer that a model gets in the middle of a loop is summed from the next loop on: leave this "
            "loop, add the layer, and begin another fleet.steps"
        )


class _Outside(NamedTuple):
    """A parameter that is not the fleet's, and the kind of the optimiser that holds it."""

    parameter: ref[torch.Tensor]
    optimizer: str

    def state(self) -> tuple[int, int]:
        """Return what changes when a backward adds to the parameter's gradient."""
        parameter = self.parameter()
        grad = None if parameter is None else parameter.grad
        return (0, 0) if grad is None else (id(grad), grad._version)


class _Holdings(NamedTuple):
    """The parameters that an optimiser holds."""

    ids: int
    """A digest of which parameters they are."""
    ours: bool
    """Whether some are the fleet's."""
    others: dict[int, _Outside]
    """The others, by ``id``."""


class _Probe:
    """Some of each parameter before an update: it shows changes by hand, those through ``p.data`` too."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parts = [(local(p).detach(), local(p)._version, _front(p)) for p in parameters if p.grad is not None]
        self.nonzero = _has_gradient(parameters, nonzero=True)
        """Whether the round's gradient had anything in it."""

    def moved(self, *, touched: bool) -> bool:
        """Return whether a parameter is another one now; ``touched``: or was written to at all."""
        if touched and any(parameter._version != version for parameter, version, _ in self._parts):
            return True
        return any(not torch.equal(_front(parameter), front) for parameter, _, front in self._parts)


def _front(parameter: torch.Tensor) -> torch.Tensor:
    return local(parameter).detach().reshape(-1)[:PROBED].clone()


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradient(parameters: Iterable[torch.Tensor], *, nonzero: bool) -> bool:
    """Return whether any of these has a gradient; ``nonzero``: waits for the device, and asks for one that is not 0."""
    found = (p.grad for p in parameters if p.grad is not None)
    return any(bool(local(grad).any()) for grad in found) if nonzero else next(found, None) is not None


def unlike_updates(reports: Sequence[float], *, workers: Sequence[int], step: int) -> str:
    """Return which workers made how many updates in the step before; empty when all that reported made equally many.

    >>> print(unlike_updates([2.0, 1.0, 0.0], workers=[0, 1, 2], step=4))
    workers made unlike numbers of updates in step 3: worker 0 made 1, worker 1 made 0. Every worker calls \
optimizer.step() alike: write step.commit(optimizer), outside of any `if` that depends on the worker
    """
    if len(set(reports) - {0.0}) < 2:
        return ""
    counts = [(worker, int(value) - 1) for worker, value in zip(workers, reports) if value]
    numbers = ", ".join(f"worker {worker} made {made}" for worker, made in counts)
    return (
        f"workers made unlike numbers of updates in step {step - 1}: {numbers}. Every worker calls optimizer.step() "
        "alike: write step.commit(optimizer), outside of any `if` that depends on the worker"
    )


_PLAIN = {bool, int, float, str, type(None)}
"""Kinds of values that cannot change in place."""
_OF_THE_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that say how it is computed, not what."""

Settings = Sequence[tuple[str, dict[str, Any]]]
"""What each parameter group is updated with, and the group's name."""
Named = Iterable[tuple[str, torch.optim.Optimizer]]
"""Optimisers, each with its name."""


def settings_of(optimizers: Named) -> list[tuple[str, dict[str, Any]]]:
    """Return what each parameter group of these optimisers is updated with, and the group's name."""
    return [
        (f"group {number} of {name}", _settings_of(group))
        for name, optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]


def rates_of(optimizers: Named) -> list[Any]:
    """Return the learning rate of each parameter group, to be compared with ``==`` later."""
    return [_comparable_later(group.get("lr")) for _, optimizer in optimizers for group in optimizer.param_groups]


class Digest:
    """Digest of the settings, computed again only when one of them has changed."""

    def __init__(self) -> None:
        self._values: tuple[int, list[Any]] = 0, []
        self._digest = 0.0

    def of(self, optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> float:
        """Return a number that workers share when their optimisers' settings are equal."""
        groups = [group for _, optimizer in optimizers for group in optimizer.param_groups]
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if set(map(type, raw)) <= _PLAIN:
            values = raw
        else:
            values = [_comparable_later(value) for value in raw]
        if (len(groups), values) != self._values:
            self._values, self._digest = (len(groups), values), digest_of(settings_of(optimizers))
        return self._digest


def digest_of(settings: Settings) -> float:
    """Return a number that workers share when these are equal; 0 when there are none. Whole and below 2**52."""
    if not settings:
        return 0.0
    return 1.0 + number_of(repr(settings).encode())


def unlike_settings(everybody: Sequence[Sequence[Sequence[Any]]], *, step: int, missing: Sequence[str]) -> str:
    """Return which group's settings differ between which workers, and why that may be; empty when none does.

    >>> lr = [[["group 0 of optimizer", {"lr": rate}]] for rate in (0.1, 0.2)]
    >>> print(unlike_settings(lr, step=3, missing=[])[:92])
    workers update with unlike settings in step 3: lr in group 0 of optimizer is 0.1 on worker 0
    """
    groups: list[dict[str, dict[str, Any]]] = [{name: settings for name, settings in mine} for mine in everybody]  # noqa: C416
    named = [(group, setting) for group, settings in groups[0].items() for setting in settings]
    given = [[mine.get(group, {}).get(setting) for mine in groups] for group, setting in named]
    apart = [
        (*where, values) for where, values in zip(named, given) if any(_unlike(value, values[0]) for value in values)
    ]
    if apart:
        group, setting, values = apart[0]
        other = next(worker for worker, value in enumerate(values) if _unlike(value, values[0]))
        difference = f"{setting} in {group} is {values[0]} on worker 0 and {values[other]} on worker {other}"
    elif any(set(mine) != set(groups[0]) for mine in groups):
        difference = "they do not have the same optimizers"
    else:
        return ""
    untracked = f"{', '.join(missing)} is not tracked, so a worker that joined or returned began it anew; "
    return (
        f"workers update with unlike settings in step {step}: {difference}. Likely causes: "
        f"{untracked if missing else ''}scheduler.step() inside the loop over micro-batches, which workers run "
        "unequally often (move it behind step.commit); a schedule fed with a worker's own figure (use step.loss or "
        "fleet.evaluate); a learning rate that depends on the rank"
    )


def _unlike(one: Any, other: Any) -> bool:
    """Return whether two settings differ by more than rounding; what a device keeps for itself is not known."""
    if one is None or other is None:
        return False
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-30)
    return bool(one != other)


def changed_rate(groups: Sequence[str], before: Sequence[Any], after: Sequence[Any], *, step: int) -> str:
    """Return which group's learning rate changed between two micro-batches of a step, and what to write.

    >>> print(changed_rate(["group 0 of optimizer"], [0.1], [0.2], step=3)[:86])
    lr in group 0 of optimizer changed from 0.1 to 0.2 between two micro-batches of step 3
    """
    changed = [
        f"lr in {group} changed from {then} to {now}" for group, then, now in zip(groups, before, after) if then != now
    ]
    difference = changed[0] if changed else "the optimizers changed"
    return (
        f"{difference} between two micro-batches of step {step}, and each worker has another number of these: a step "
        "has one update, so move scheduler.step(), or whatever changed it, behind step.commit"
    )


@contextmanager
def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Learning rates times ``factor`` for one update, and as they were afterwards."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"] for group in groups]
    for group, rate in zip(groups, before, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain for name, value in group.items() if name not in _OF_THE_DEVICE for plain in _comparable(value)}


def _comparable_later(value: Any) -> Any:
    """Something to be compared with ``==`` later, also when the value is changed in place."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _comparable(value) or id(value)
    return [_comparable_later(item) for item in value] if isinstance(value, (list, tuple)) else value


def _comparable(value: Any) -> list[Any]:
    """Return the value as plain data; nothing where reading it would make a device wait, or it is not plain."""
    if isinstance(value, torch.Tensor):
        return [value.item()] if value.numel() == 1 and value.device.type == "cpu" else []
    if isinstance(value, (list, tuple)):
        parts = [part for item in value for part in _comparable(item)]
        return [parts] if len(parts) == len(value) else []
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return [float(value)]  # not one of its subclasses, which are written differently
    return [value] if isinstance(value, (bool, int, str, type(None))) else []
