"""Modules and optimisers of the script that the fleet was not given: a teacher, a network that the loss goes through.

They are searched by the names that the script has for them: in its functions under way, in its own files' globals,
and one level down: in plain dicts, lists and tuples and in the attributes of objects, without a call of any method of
theirs (a mapping that loads what it is asked for stays unloaded). Some may well be each worker's own, and most are
never used in a step. So unlike weights are refused when a step uses them: until then only those that differ have a
hook.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import torch

from paceline.errors import MisuseError
from paceline.gradients.header import number_of
from paceline.step.checks.sameness import is_readable, sampled_number, state_of

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
