"""Modules and optimisers of the script that the fleet was not given: a teacher, a network that the loss goes through.

They are looked for by the names that the script has for them: in its functions under way, in its own files' globals,
and one level down. Some may well be each worker's own, and most are never used in a step. So unlike weights are refused
when a step uses them: until then only those that differ have a hook.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import torch

from paceline.combine.header import number_of
from paceline.errors import MisuseError
from paceline.loop.replicas import sums_of
from paceline.loop.sameness import is_readable, state_of

SAMPLED = 1024
"""Numbers of each tensor that are compared, about."""
MOST = 256
"""Entries of an object or container that are looked at."""
_LIBRARIES = (os.path.dirname(os.__file__), "<")
"""What the files of the standard library, of what is installed, and of no file begin with."""

Others = dict[str, list[Any]]
"""By the script's name: a digest of what kind of thing it is, and a number of what it holds."""


class Bystanders:
    """Those of one worker."""

    def __init__(self, current: Callable[[], str]) -> None:
        """``current``: the step that is being worked on, in words; empty outside of steps."""
        self._current = current
        self._found: dict[str, Any] = {}
        self._hooks: list[Any] = []

    def look(self, known: Iterable[Any], ours: Callable[[torch.optim.Optimizer], bool]) -> Others:
        """Find them and say what they are. ``known``: what the fleet has; ``ours``: whether an optimiser updates its
        parameters."""
        self.close()
        held = {id(part) for thing in known for part in _inside(thing)}
        self._found = {}
        said: Others = {}
        for name, thing in _named_in_script():
            if id(thing) in held or any(thing is other for other in self._found.values()):
                continue
            if isinstance(thing, torch.optim.Optimizer):
                if not ours(thing):
                    continue
                number = int(state_of([(name, thing)]).number())
                kind = _digest(type(thing).__qualname__)
            else:
                tensors = [tensor for tensor in _tensors(thing) if id(tensor) not in held]
                if not tensors:
                    continue
                number = _sampled(tensors)
                kind = _digest(type(thing).__qualname__, *((list(t.shape), str(t.dtype)) for t in tensors))
            self._found[name], said[name] = thing, [kind, number]
        return said

    def refuse_unlike(self, everybody: Sequence[Others]) -> None:
        """Raise MisuseError for an optimiser that holds another state on some worker; have modules raise it in the
        first step that uses them."""
        for name, thing in self._found.items():
            said = [others.get(name) for others in everybody]
            if any(one is None or one[0] != said[0][0] for one in said):  # type: ignore[index]
                continue  # it is not the same thing everywhere
            apart = [worker for worker, one in enumerate(said) if one != said[0]]
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


def _refuse(module: torch.nn.Module, inputs: Any, *, text: str, current: Callable[[], str]) -> None:
    if step := current():
        raise MisuseError(f"{step} uses {text}")


def _track(name: str) -> str:
    return f"fleet.track({name.rpartition('.')[2] if '[' not in name else 'other'}={name})"


def _named_in_script() -> Iterator[tuple[str, Any]]:
    """Modules and optimisers by the script's names for them."""
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
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            yield name, value
            continue
        for key, part in _parts(value):
            if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
                yield f"{name}{key}", part


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What an object or container of the script's holds."""
    if isinstance(value, dict):
        pairs = [(f"[{key!r}]", part) for key, part in list(value.items())[:MOST]]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"[{number}]", part) for number, part in enumerate(value[:MOST])]
    elif isinstance(value, (type, ModuleType)) or type(value).__module__.partition(".")[0] in ("builtins", "paceline"):
        pairs = []
    else:
        own = getattr(value, "__dict__", None)
        pairs = [(f".{key}", part) for key, part in list(own.items())[:MOST]] if isinstance(own, dict) else []
    return pairs


def _inside(thing: Any) -> Iterator[Any]:
    """A thing, its modules and their tensors."""
    yield thing
    if isinstance(thing, torch.nn.Module):
        yield from thing.modules()
        yield from _tensors(thing)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in found if is_readable(tensor) and tensor.numel()]


def _sampled(tensors: Sequence[torch.Tensor]) -> int:
    parts = [tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED)] for tensor in tensors]
    return _digest(sums_of(parts))


def _digest(*what: Any) -> int:
    return number_of(repr(what).encode())
