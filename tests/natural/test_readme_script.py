"""The README's script, taken from its text, runs as it stands: alone, and the same with two workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import apart, results

pytestmark = pytest.mark.fleet

README = Path(__file__).parents[2] / "README.md"
SEEDED = "import torch\ntorch.manual_seed(5)\n"
WEIGHTS = "\nresult = [value for p in model.parameters() for value in p.detach().flatten().tolist()]\n"


def test_the_script_of_the_readme_runs_alone_and_the_same_with_two_workers(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    alone = results(tmp_path / "alone", script + WEIGHTS, workers=1, before=SEEDED)
    one, other = results(tmp_path / "two", script + WEIGHTS, before=SEEDED)
    assert one == other
    assert apart(one, alone[0]) < 1e-4


def test_with_the_pace_that_it_has_by_itself_its_workers_stay_equal(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    one, other = results(tmp_path, script + WEIGHTS, before=SEEDED, PACELINE_PACE="auto")
    assert one == other
