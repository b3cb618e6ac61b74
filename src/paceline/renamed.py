"""Names of 0.1 that 0.2 replaced: a script or command that still has one is told the present name.

The changelog has the same table for readers. Nothing here makes an old name work.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

KEYWORDS = {
    "wire": "comm_dtype",
    "whole": "fixed_micro_batch",
    "varying_count": "lr_scaling",
    "runs": "output_dir",
}
"""Present names of keywords."""

VARIABLES = {"PACELINE_WIRE": "PACELINE_COMM_DTYPE", "PACELINE_GROUP": "PACELINE_PROCS_PER_WORKER"}
"""Present names of environment variables."""

OPTIONS = {
    "--wire": "--comm-dtype",
    "--group": "--procs-per-worker",
    "--runs": "--output-dir",
    "--token": "--token-file FILE, or set PACELINE_TOKEN (every user of a computer sees its options)",
}
"""What the command line takes in place of former options."""

COMMANDS = {"compare": "report"}
"""Present names of subcommands."""

P = ParamSpec("P")
R = TypeVar("R")


class FormerNames:
    """Base of classes some of whose attributes have another name now: the AttributeError says which."""

    _former_names: ClassVar[Mapping[str, str]] = {}
    """What to write in place of each former attribute."""

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> object:
            kind = type(self)
            text = f"{kind.__name__!r} object has no attribute {name!r}"
            if (present := kind._former_names.get(name)) is not None:
                text += f": since 0.2 it is {present}"
            raise AttributeError(text, name=name, obj=self)


def names_present_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """Return ``call`` with a TypeError that names the present keyword where a former one is given.

    >>> names_present_keywords(lambda *, comm_dtype: comm_dtype)(wire="bf16")
    Traceback (most recent call last):
    TypeError: wire= is comm_dtype= since 0.2: write comm_dtype='bf16'
    """
    taken = inspect.signature(call).parameters
    former = {old: new for old, new in KEYWORDS.items() if new in taken and old not in taken}

    @functools.wraps(call)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for old, new in former.items():
            if old in given:
                raise TypeError(f"{old}= is {new}= since 0.2: write {new}={given[old]!r}")
        return call(*args, **given)

    return checked


def check_variables() -> None:
    """Raise ValueError when a variable is set under its former name, which would be passed over in silence."""
    for old, new in VARIABLES.items():
        if old in os.environ:
            raise ValueError(f"{old} is {new} since 0.2: set {new}={os.environ[old]}, and unset {old}")
