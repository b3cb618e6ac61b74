"""Runs small training scripts as a user would write them, with real workers.

A script is text. It ends with what is compared in the variable ``result`` (plain data). `BEFORE` holds the lines that
nearly all of them begin with: data whose gradients are known, a small network, and ``flat``, all its weights as a list.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from crew import Crew, Outcome
from flock import Flock

BEFORE = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import paceline

torch.manual_seed(3)
x = torch.randn(48, 4, dtype=torch.float64)
y = torch.randint(0, 3, (48,))
data = TensorDataset(x, y)
loss_fn = nn.CrossEntropyLoss()

def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def flat(*models):
    return [value for model in models for p in model.parameters() for value in p.detach().flatten().tolist()]
"""

LANGEVIN = """
class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.001 * torch.randn_like(p))
"""
"""An optimiser that draws random numbers."""


def written(folder: Path, text: str, *, before: str = BEFORE) -> str:
    """The script in a file; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(before + dedent(text))
    return str(path)


def outcomes(
    folder: Path, text: str, *, workers: int = 2, before: str = BEFORE, args: Any = None, **env: str
) -> list[Outcome]:
    """How each worker of a fixed fleet ended."""
    path = written(folder, text, before=before)
    with Crew(path, workers, folder, args=args, env={"QUICK_EXIT": "1", "PACELINE_PACE": "equal", **env}) as crew:
        return crew.wait()


def results(
    folder: Path, text: str, *, workers: int = 2, before: str = BEFORE, args: Any = None, **env: str
) -> list[Any]:
    """What each worker left in ``result``; all must end well."""
    ended = outcomes(folder, text, workers=workers, before=before, args=args, **env)
    for rank, outcome in enumerate(ended):
        assert outcome.code == 0, f"worker {rank} ended with {outcome.code}:\n{outcome.err[-4000:]}"
    return [outcome.value for outcome in ended]


def refusals(folder: Path, text: str, *, workers: int = 2, before: str = BEFORE, args: Any = None, **env: str) -> str:
    """What the workers said, all of which must have ended with an error."""
    ended = outcomes(folder, text, workers=workers, before=before, args=args, **env)
    assert all(outcome.code != 0 for outcome in ended), [(o.code, o.err[-2000:]) for o in ended]
    return "\n".join(outcome.err for outcome in ended)


def elastic(
    folder: Path,
    text: str,
    *,
    workers: int = 2,
    before: str = BEFORE,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Flock:
    """An elastic fleet whose workers run the script; a context manager (flock.py)."""
    path = written(folder, text, before=before)
    return Flock(path, workers, folder, env={"PACELINE_PACE": "equal", **(env or {})}, **options)


def back_after_a_kill(folder: Path, text: str, *, at_step: int) -> list[Any]:
    """What two workers left in ``result``; the second was killed after a step and has come back. Both must end well."""
    with elastic(folder, text) as fleet:
        fleet.wait_for_step(at_step)
        fleet.kill(1)
        fleet.wait_for_workers(1)
        fleet.start(1)
        fleet.wait_for_workers(2)
        ended = fleet.hurry()
    assert [one.code for one in ended.values()] == [0, 0], [one.err[-2000:] for one in ended.values()]
    return [ended[0].value, ended[1].value]


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference of two lists of weights."""
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
