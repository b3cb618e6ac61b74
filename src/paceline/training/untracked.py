"""Objects of the script that the fleet was not given.

What is not tracked would begin anew in a resumed run, or on a worker that joins. `UntrackedChecks` searches it where
that would happen: at the first step of a loop, before and after a checkpoint is loaded, and when one is written.

`Bystanders` are modules and optimisers such as a teacher, or a network that the loss goes through. They are searched by
the names that the script has for them: in its functions under way, in its own files' globals, and one level down: in
plain dicts, lists and tuples and in the attributes of objects, without a call of any method of theirs (a mapping that
loads what it is asked for stays unloaded). Some may well be each worker's own, and most are never used in a step. So
unlike weights are refused when a step uses them: until then only those that differ have a hook.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.load import Found
from paceline.errors import MisuseError
from paceline.gradients.header import number_of
from paceline.step.checks.sameness import is_readable, sampled_number, state_of
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


MOST = 256
"""Entries of an object or container that are searched."""
_LIBRARIES = (os.path.dirname(os.__file__), "<")
"""Prefixes of the file names of the standard library, of installed packages, and of code without a file."""

Others = dict[str, list[Any]]
"""Digest of the object's type, and a number of its content, by the script's name."""


class Bystanders:
    """The bystanders of one worker."""

    def __init__(self, current: Callable[[], str]) -> None:
        """Take ``current``, which returns the name of the step under way; empty outside of steps."""
        self._current = current
        self._found: dict[str, Any] = {}
        self._hooks: list[Any] = []

    def look(self, known: Iterable[Any], ours: Callable[[torch.optim.Optimizer], bool]) -> Others:
        """Find the bystanders and return their digests.

        Args:
            known: objects that the fleet has.
            ours: returns whether an optimiser updates the fleet's parameters.
        """
        self.close()
        held = {id(part) for thing in known for part in _inside(thing)}
        self._found = {}
        digests: Others = {}
        for name, thing in named_in_script():
            if id(thing) in held or any(thing is other for other in self._found.values()):
                continue
            try:
                found = _described(name, thing, held, ours)
            except Exception:  # an object of the script's that cannot be looked at ends no training
                continue
            if found is not None:
                self._found[name], digests[name] = thing, found
        return digests

    def refuse_unlike(self, everybody: Sequence[Others]) -> None:
        """Raise MisuseError for an optimiser whose state differs between workers.

        Modules that differ raise it in the first step that uses them.
        """
        for name, thing in self._found.items():
            digests = [others.get(name) for others in everybody]
            if any(one is None or one[0] != digests[0][0] for one in digests):  # type: ignore[index]
                continue  # it is another kind of object on some worker
            apart = [worker for worker, one in enumerate(digests) if one != digests[0]]
            if not apart:
                continue
            if isinstance(thing, torch.optim.Optimizer):
                raise MisuseError(
                    f"before the first step {name} holds another state on worker {apart[0]} than on worker 0: write "
                    f"{_track(name)} before the loop, which gives every worker the leader's, or load it on all"
                )
            text = (
                f"{name} ({type(thing).__name__}), which holds other weights on worker {apart[0]} than on worker 0 and "
                f"was not given to the fleet: write {_track(name)} before the loop, which gives every worker the "
                "leader's; or load it, or make it after torch.manual_seed(...), on every worker alike"
            )
            hook = partial(_refuse, text=text, current=self._current)
            self._hooks += [module.register_forward_pre_hook(hook) for module in thing.modules()]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._found = [], {}


def _described(
    name: str, thing: Any, held: set[int], ours: Callable[[torch.optim.Optimizer], bool]
) -> list[Any] | None:
    """Return the kind and the contents of a module or optimiser, as numbers; None for one that is not compared."""
    kind = type(thing).__qualname__
    if isinstance(thing, torch.optim.Optimizer):
        return [_digest(kind), int(state_of([(name, thing)]).number())] if ours(thing) else None
    tensors = [tensor for tensor in _tensors(thing) if id(tensor) not in held]
    if not tensors:
        return None
    return [_digest(kind, *((list(t.shape), str(t.dtype)) for t in tensors)), sampled_number(tensors)]


def _refuse(module: torch.nn.Module, inputs: Any, *, text: str, current: Callable[[], str]) -> None:
    if step := current():
        raise MisuseError(f"{step} uses {text}")


def _track(name: str) -> str:
    return f"fleet.track({name.rpartition('.')[2] if '[' not in name else 'other'}={name})"


def named_in_script() -> Iterator[tuple[str, Any]]:
    """Yield modules and optimisers by the script's names for them, from the functions under way and their globals."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("paceline."):
            file = frame.f_code.co_filename
            if not file.startswith(_LIBRARIES) and "/site-packages/" not in file:
                yield from _things(frame.f_locals)
                if frame.f_locals is not frame.f_globals:
                    yield from _things(frame.f_globals)
        frame = frame.f_back


def _things(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if name.startswith("__"):
            continue
        if _is_wanted(value):
            yield name, value
            continue
        for key, part in _parts(value):
            if _is_wanted(part):
                yield f"{name}{key}", part


def _is_wanted(value: Any) -> bool:
    """Return whether the value is a module or optimiser by its type: ``__class__`` may be a property of its own."""
    return issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return what an object or plain container of the script's holds, without a call of a method of its own."""
    kind = type(value)
    if kind is dict:
        return _entries(value, "[{!r}]")
    if kind is list or kind is tuple:
        return [(f"[{number}]", part) for number, part in enumerate(value[:MOST])]
    if issubclass(kind, (type, ModuleType)) or str(kind.__module__).partition(".")[0] in ("builtins", "paceline"):
        return []
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property of that name that fails
        return []
    return _entries(own, ".{}") if type(own) is dict else []


def _entries(names: dict[Any, Any], form: str) -> list[tuple[str, Any]]:
    pairs = [(key, part) for key, part in list(names.items())[:MOST] if type(key) in (str, int)]
    return [(form.format(key), part) for key, part in pairs]


def _inside(thing: Any) -> Iterator[Any]:
    """Yield an object, its modules and their tensors."""
    yield thing
    if isinstance(thing, torch.nn.Module):
        yield from thing.modules()
        yield from _tensors(thing)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in found if is_readable(tensor) and tensor.numel()]


def _digest(*what: Any) -> int:
    return number_of(repr(what).encode())
