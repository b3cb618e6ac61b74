"""A clock of a test's own, in one module of the library."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline import concurrency


def give_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType, clock: Any) -> None:
    """Let ``module`` read and sleep by what ``clock`` has of `paceline.concurrency`'s names; the rest stays real."""
    own = {name: getattr(clock, name) for name in concurrency.REPLACED if hasattr(clock, name)}
    monkeypatch.setattr(module, "concurrency", SimpleNamespace(**{**vars(concurrency), **own}))
