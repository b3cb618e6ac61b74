"""A combine of a user's own: one class, registered with one line, and nothing else edited."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import BEFORE, apart, results
from typer.testing import CliRunner

from paceline.cli import app
from paceline.observe import read_log, verdict

pytestmark = pytest.mark.fleet

TOY = """
from paceline.training.combines import register
from paceline.step.combine import GradientCombine


class SignOfTheMean(GradientCombine):
    # The update has the sign of the fleet's mean gradient, as signSGD has it.
    def exchange(self, step, clip_norm, *, own):
        applied = super().exchange(step, clip_norm, own=own)
        for parameter in self.loop.gradients.everything if applied else ():
            if parameter.grad is not None:
                parameter.grad.sign_()
        return applied


register("sign", SignOfTheMean)
"""

TRAINING = """
with paceline.join(combine="sign") as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    moved = {round(abs(x - y) / 0.01, 9) for x, y in zip(flat(network()), flat(model))}
    result = [flat(model), sorted(moved)]
"""


def test_a_combine_of_the_users_own_runs_in_a_fleet_and_in_its_report(tmp_path: Path) -> None:
    first, second = results(tmp_path / "two", TRAINING, before=BEFORE + TOY)
    assert first == second
    alone = results(tmp_path / "one", TRAINING, before=BEFORE + TOY, workers=1)[0]
    assert apart(first[0], alone[0]) < 1e-12, "as one machine does with the whole batch"
    assert all(steps == int(steps) and steps <= 8 for steps in first[1]), "every update is the learning rate or nothing"
    run = read_log(tmp_path / "two" / "run")
    assert run.run["combine"] == "sign"
    assert len(run.records) == 8
    assert verdict(run).figures.samples_per_s > 0
    report = CliRunner().invoke(app, ["report", str(tmp_path / "two" / "run")]).stdout
    assert "combine sign" in report


def test_an_unknown_combine_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    from paceline.training.combines import make_combine

    with pytest.raises(ValueError, match="known: gradients, average, elastic-average"):
        make_combine("toy")
