"""A merge of a user's own: its settings and its class in one file, one line to add it, and nothing else edited."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from programs import BEFORE, apart, results
from typer.testing import CliRunner

from paceline.averaging.merge import PRESENT, SAMPLES, Merge, MergeSettings, Table
from paceline.cli import app
from paceline.observe import read_log
from paceline.transport import Transport

pytestmark = pytest.mark.fleet


@dataclass(frozen=True, kw_only=True)
class Pooled(MergeSettings):
    """Parameters are pooled after every ``steps`` local steps."""

    steps: int = 2
    name: ClassVar[str] = "pooled"

    @property
    def steps_per_round(self) -> int:
        return self.steps

    def merge(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> Pool:
        return Pool(parameters, transport)


class Pool(Merge):
    """The parameters themselves, and not their updates, weighted by samples: ``x <- sum_i n_i x_i / sum_i n_i``."""

    def part(self, table: Table, update: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        samples = table[:, SAMPLES] * table[:, PRESENT]
        weight = float(samples[self._transport.rank] / samples.sum())
        return [weight * parameter.detach() for parameter in self._parameters]

    def take(self, table: Table, total: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.rounds += 1
        for parameter, pooled in zip(self._parameters, total, strict=True):
            parameter.data.copy_(pooled)


TOY = f"""from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
import torch
from paceline.averaging.merge import MERGES, PRESENT, SAMPLES, Merge, MergeSettings, Table
from paceline.transport import Transport

{inspect.getsource(Pooled)}

{inspect.getsource(Pool)}

MERGES.add(Pooled.name, Pooled)
"""
"""Both classes in a script of their own, and the one line."""

TRAINING = """
with paceline.join(combine=eval(os.environ["ASKED"])) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    rounds = []
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=4):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        rounds.append(step.round)
    result = [flat(model), rounds, fleet.combine.name]
"""


def trained(folder: Path, asked: str) -> list[list[float]]:
    first, second = results(folder, TRAINING, before=TOY + BEFORE, ASKED=asked)
    assert first == second, "both hold the same bits"
    return list(first)


def test_a_fleet_of_two_trains_with_it_as_with_the_average_it_is_another_form_of(tmp_path: Path) -> None:
    weights, rounds, name = trained(tmp_path / "pooled", "'pooled'")
    assert name == "pooled"
    assert rounds == [step // 2 for step in range(16)], "a round after every two local steps"
    averaged = trained(tmp_path / "averaged", "paceline.Averaging(every_steps=2)")
    assert apart(weights, averaged[0]) < 1e-12
    run = read_log(tmp_path / "pooled" / "run")
    assert run.run["combine"] == "pooled"
    report = CliRunner().invoke(app, ["report", str(tmp_path / "pooled" / "run")]).stdout
    assert "combine pooled" in report


def test_its_settings_are_taken_as_an_object(tmp_path: Path) -> None:
    _, rounds, _ = trained(tmp_path / "four", "Pooled(steps=4)")
    assert rounds == [step // 4 for step in range(16)]


def test_the_toy_is_short() -> None:
    assert len(TOY.splitlines()) < 50
