"""Names that 0.2 replaced: a script or a command that still has one is told the present name, and the changelog too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import paceline
from paceline import renamed
from paceline.cli import app
from paceline.fleet import Fleet
from paceline.step.step import Step

ROOT = Path(__file__).parents[1]
CHANGES = (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    with paceline.join(quiet=True, run_dir=tmp_path / "run") as fleet:
        yield fleet


DATA = TensorDataset(torch.zeros(8, 3), torch.zeros(8, 1))


@pytest.mark.parametrize(
    ("call", "present"),
    [
        (lambda fleet: fleet.gather(len, DATA), "fleet.predict(fn, data)"),
        (lambda fleet: fleet.agree(True), "fleet.any(flag)"),
        (lambda fleet: fleet.size, "fleet.world_size"),
        (lambda fleet: next(iter(fleet.steps(DATA, global_batch=8))).combine(), "step.reduce()"),
    ],
)
def test_a_former_attribute_is_told_its_present_name(
    fleet: paceline.Fleet, call: Callable[[Any], Any], present: str
) -> None:
    fleet.model(nn.Linear(3, 1))
    with pytest.raises(AttributeError, match=re.escape(f"since 0.2 it is {present}")):
        call(fleet)


def test_an_attribute_that_never_was_is_no_former_one(fleet: paceline.Fleet) -> None:
    with pytest.raises(AttributeError, match=r"'Fleet' object has no attribute 'gathers'$"):
        fleet.gathers  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(fleet, "gather")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda fleet: paceline.join(wire="bf16"), "wire= is comm_dtype= since 0.2: write comm_dtype='bf16'"),
        (lambda fleet: paceline.launch(print, workers=1, wire="bf16"), "write comm_dtype='bf16'"),
        (lambda fleet: fleet.steps(DATA, global_batch=8, whole=True), "write fixed_micro_batch=True"),
        (lambda fleet: fleet.steps(DATA, global_batch=8, varying_count="gain"), "write lr_scaling='gain'"),
    ],
)
def test_a_former_keyword_is_told_its_present_name(
    fleet: paceline.Fleet, call: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(fleet)


@pytest.mark.parametrize("name", ["Cutoff", "ElasticAverage"])
def test_what_is_research_is_under_that_name(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"since 0\.2 it is paceline\.research\.{name}"):
        getattr(paceline, name)
    assert getattr(paceline.research, name).__module__.startswith("paceline.research.")


@pytest.mark.parametrize("name", renamed.VARIABLES)
def test_a_former_variable_is_refused_and_not_passed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"{name} is {renamed.VARIABLES[name]} since 0.2"):
        paceline.join(quiet=True)


@pytest.mark.parametrize("option", renamed.OPTIONS)
def test_a_former_option_is_told_what_takes_its_place(option: str) -> None:
    done = CliRunner().invoke(app, ["run", option, "2", "train.py"])
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert f"{option} is gone since 0.2: write {renamed.OPTIONS[option]}" in said


def test_a_former_command_is_told_its_present_name() -> None:
    done = CliRunner().invoke(app, ["compare", "a", "b"])
    assert done.exit_code == 2
    assert "paceline compare is gone since 0.2: write paceline report" in done.stderr


def test_the_changelog_has_every_former_name() -> None:
    table = CHANGES.partition("### Names")[2].partition("\n### ")[0]
    former = [*renamed.KEYWORDS, *renamed.VARIABLES, *renamed.OPTIONS, "compare", "gather", "agree", "size", "combine"]
    assert not [name for name in former if not re.search(rf"`[^`]*{re.escape(name)}\b[^`]*` \|", table)]


FORMER = [
    *(rf"(?<!reduce\(){name}=" for name in renamed.KEYWORDS),
    *(rf"{name}\b" for name in renamed.VARIABLES),
    *(rf"(?<![\w-]){name}(?![\w-])" for name in renamed.OPTIONS),
    *(rf"paceline {name}\b" for name in renamed.COMMANDS),
    *(rf"fleet\.{name}\b" for name in Fleet._former_names),
    *(rf"step\.{name}\b" for name in Step._former_names),
    r"paceline\.(Cutoff|ElasticAverage)\b",
    r"(?<!research\.)\bElasticAverage\(",
]
"""Patterns of what nobody can write any more. ``step.reduce(whole=)`` is a present name."""


@pytest.mark.parametrize("page", ["CHANGELOG.md", "README.md", "CONTRIBUTING.md"])
def test_no_former_name_stands_outside_of_the_table_for_those_who_change(page: str) -> None:
    text = (ROOT / page).read_text().partition("\n## 0.1.0")[0]
    before, _, rest = text.partition("\n### Names\n")
    used = before + rest.partition("\n### Changes\n")[2]
    assert not [found[0] for pattern in FORMER for found in re.finditer(pattern, used)]


def test_former_names_are_noticed_and_present_ones_are_not() -> None:
    former = "`wire=` `varying_count=` `--group 2` `--token x` `paceline compare` `fleet.gather` `step.combine()`"
    for word in [*re.findall(r"`(.*?)`", former), "ElasticAverage(tau=1)", "PACELINE_WIRE"]:
        assert any(re.search(pattern, word) for pattern in FORMER), word
    present = "--token-file t, step.reduce(whole=False), paceline.research.ElasticAverage(tau=1), PACELINE_GROUP_DIR"
    assert not [pattern for pattern in FORMER if re.search(pattern, present)]
