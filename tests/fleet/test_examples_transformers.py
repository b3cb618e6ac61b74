"""The example with Transformers' Trainer: it learns, alone and on unlike workers, and goes on from its checkpoint."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from crew import nursery
from scripts import EMULATED, FORKED_ALONE, TORCHRUN, Script, run

if find_spec("transformers") is None:
    pytest.skip("needs pip install 'paceline[transformers]'", allow_module_level=True)

pytestmark = pytest.mark.fleet

SMALL = ("--samples", 120, "--epochs", 2, "--width", 16, "--global-batch", 16)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Script:
    for module in ("paceline.adapters.transformers", "transformers.models.gpt2.modeling_gpt2"):
        nursery().load(module)
    return run("transformers_gpt.py", *SMALL, folder=tmp_path_factory.mktemp("alone"), launcher=FORKED_ALONE)


def held_out(script: Script) -> list[float]:
    """The evaluations' losses."""
    return [float(ast.literal_eval(line)["eval_loss"]) for line in script.out if "'eval_loss'" in line]


def test_it_learns_and_says_how_far_it_came(alone: Script) -> None:
    losses = held_out(alone)
    assert len(losses) == 3, "two epochs, and once more at the end"
    assert losses[1] < losses[0] < 5.6, "which is what a guess among 256 bytes costs"
    assert any(re.fullmatch(r"held out: \S+ a byte after 14 steps", line) for line in alone.out)


@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.long), pytest.param(EMULATED, id="emulated")]
)
def test_two_workers_do_the_same_and_only_the_leader_speaks(
    launcher: tuple[str, ...], alone: Script, tmp_path: Path
) -> None:
    two = run("transformers_gpt.py", *SMALL, folder=tmp_path, launcher=launcher)
    assert held_out(two) == pytest.approx(held_out(alone), rel=0.02), "but for dropout"
    assert sum("'loss'" in line for line in two.out) == sum("'loss'" in line for line in alone.out)
    assert sum(line.startswith("held out") for line in two.out) == 1


def test_it_goes_on_from_its_newest_checkpoint(alone: Script, tmp_path: Path) -> None:
    (tmp_path / "transformers_gpt").symlink_to(alone.folder / "transformers_gpt")
    more = [*SMALL[:2], "--epochs", 3, *SMALL[4:], "--resume"]
    longer = run("transformers_gpt.py", *more, folder=tmp_path, launcher=FORKED_ALONE)
    assert len(held_out(longer)) == 2, "the third epoch, and the end"
    assert any(line.endswith("after 21 steps") for line in longer.out)
