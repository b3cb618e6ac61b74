"""Autograd's calls after it has put or added to a parameter's gradient, from all parameters or from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Came = Callable[[int, torch.nn.Parameter], None]
"""Hears that parameter number so many has a gradient."""


class Callbacks:
    """Calls ``came`` for the parameters that are listened to: at first for all.

    torch looks into a parameter's dictionary of hooks whenever its gradient comes; an empty one costs next to nothing.
    Taking a hook out and putting it back is quicker than registering it again.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], came: Came) -> None:
        self._calls = [partial(came, number) for number in range(len(parameters))]
        self._handles = [_register(p, call) for p, call in zip(parameters, self._calls, strict=True)]
        self._hooks: list[dict[int, Any]] = [handle.hooks_dict_ref() for handle in self._handles]
        self._only: int | None = None

    @property
    def all(self) -> bool:
        """Whether all parameters call."""
        return self._only is None

    def listen(self, only: int | None) -> None:
        """To this parameter alone, or to all."""
        if only == self._only:
            return
        for number, (hooks, handle, call) in enumerate(zip(self._hooks, self._handles, self._calls, strict=True)):
            if only is None or number == only:
                hooks[handle.id] = call
            else:
                hooks.pop(handle.id, None)
        self._only = only

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _register(parameter: Any, call: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(call)
