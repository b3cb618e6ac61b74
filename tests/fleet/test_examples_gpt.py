"""The tiny GPT: it learns, and its loss curve does not depend on who did how many of the tokens."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import EMULATED, EXAMPLES, FORKED_ALONE, TORCHRUN, Script, run

pytestmark = pytest.mark.fleet

SMALL = ("--lines", 500, "--epochs", 2, "--global-batch", 32, "--micro-batch", 8)


def records(folder: Path) -> list[dict[str, Any]]:
    """The steps in the run's event log."""
    (log,) = folder.rglob("events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return run("tiny_gpt.py", *SMALL, folder=tmp_path_factory.mktemp("alone"), launcher=FORKED_ALONE)


def test_the_loss_falls_and_the_leader_shows_what_it_writes(alone: Script) -> None:
    losses = [record["loss"] for record in records(alone.folder)]
    assert len(losses) == 2 * 16
    assert losses[0] > 3.2
    assert sum(losses[-4:]) / 4 < 0.6 * losses[0]
    held_out = [float(found[1]) for found in re.finditer(r"held out (\S+) a character", "\n".join(alone.out))]
    assert held_out[1] < held_out[0] < losses[0]
    assert len(alone.out) == 2 + 6, "two epochs and six lines of its own"


@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.long), pytest.param(EMULATED, id="emulated")]
)
def test_two_workers_follow_the_curve_of_one(launcher: tuple[str, ...], alone: Script, tmp_path: Path) -> None:
    two = run("tiny_gpt.py", *SMALL, folder=tmp_path, launcher=launcher, PACELINE_PACE="adaptive")  # no deadline
    ours, theirs = records(two.folder), records(alone.folder)
    assert [sum(r["samples"]) for r in ours] == [sum(r["samples"]) for r in theirs]
    assert [r["weight"] for r in ours] == [r["weight"] for r in theirs], "the same tokens in every step"
    assert len({r["weight"] / sum(r["samples"]) for r in ours}) > 20, "lines differ in length"
    if launcher is EMULATED:
        assert any(r["samples"][0] > r["samples"][1] for r in ours), "the machines are not alike"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5), f"step {mine['step']}"
    assert len(two.out) == len(alone.out), "only the leader writes"


def test_a_mean_of_means_would_be_another_loss() -> None:
    """So the weights matter: without them the curves above could not agree."""
    sys.path.insert(0, str(EXAMPLES))
    import tiny_gpt

    torch.manual_seed(0)
    model, lines = tiny_gpt.TinyGPT(), tiny_gpt.lines(16, seed=1)

    def loss(part: list[str]) -> tuple[float, int]:
        tokens, wanted = tiny_gpt.pad(part)
        total = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(), reduction="sum")
        count = int((wanted != tiny_gpt.IGNORED).sum())
        return total.item() / count, count

    pieces = [loss(sorted(lines, key=len)[start : start + 4]) for start in range(0, 16, 4)]
    whole, _ = loss(lines)
    weighted = sum(mean * count for mean, count in pieces) / sum(count for _, count in pieces)
    plain = sum(mean for mean, _ in pieces) / len(pieces)
    assert weighted == pytest.approx(whole, rel=1e-5)
    assert abs(plain - whole) > 1e-3
