"""A run does without the plug-in: with `paceline.research` not installed, everything of the core works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import BEFORE, results

pytestmark = pytest.mark.fleet

NOT_INSTALLED = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["paceline", "research"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not [name for name in sys.modules if name.startswith("paceline.research")]
sys.meta_path.insert(0, NotInstalled())
"""

TRAIN = """
import time

with paceline.join(pace=os.environ["ASKED_PACE"], combine=os.environ["ASKED_COMBINE"]) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=3):
        for a, b in step:
            time.sleep(0.001)
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    fleet.save(fleet.run_dir / "last.paceline")
    result = [fleet.pacer.name, flat(model)]
assert not [name for name in sys.modules if name.startswith("paceline.research")]
"""

BY_HAND = f"""{NOT_INSTALLED}
import paceline
from paceline.cli import main
from paceline.training.combines import make_combine

refused = []
for ask in (
    lambda: paceline.research.Cutoff,
    lambda: paceline.research.ElasticAverage,
    lambda: make_combine("elastic-average"),
):
    try:
        ask()
    except ImportError as error:
        refused.append(str(error))
assert len(refused) == 3, refused
sys.argv = ["paceline", "simulate", "--scenario", "calm", "--workers", "4", "--steps", "30", "--json"]
main()
"""


@pytest.mark.parametrize(
    ("pace", "combine"),
    [("adaptive", "gradients"), ("joint", "gradients"), ("auto", "gradients"), ("auto", "average")],
)
def test_a_fleet_trains_without_it(tmp_path: Path, pace: str, combine: str) -> None:
    asked = {"ASKED_PACE": pace, "ASKED_COMBINE": combine, "PACELINE_PACE": ""}
    first, second = results(tmp_path, TRAIN, before=NOT_INSTALLED + BEFORE, **asked)
    assert first[0] == pace
    assert first == second


def test_the_simulator_plays_the_paces_that_are_there_and_the_others_are_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rules = {row["rule"] for row in json.loads(ended.stdout)["rules"]}
    assert {"naive", "adaptive", "joint", "auto", "limit"} <= rules
    assert "Elfving" not in rules
