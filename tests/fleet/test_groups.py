"""Workers of several processes: the model is divided inside and replicated across, and every invariant holds."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import exact_cases
import group_cases
import numpy as np
import pytest
import torch
from crew import Crew
from group_cases import newest
from groups import GroupFlock, Groups, run_groups
from test_elastic import UNHURRIED, must_be_sound
from test_exactness import random_cases
from torch import nn

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = pytest.mark.fleet

CASE = "group_cases.py:train"


@cache
def alone() -> dict[str, Any]:
    """The same training on one machine, in plain torch but for the order of the samples."""
    from paceline.feed import Feed

    model, samples = group_cases.Net().double(), group_cases.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    feed, losses, norms = Feed(group_cases.LENGTH, workers=1, seed=0), [], []
    for epoch in range(2):
        feed.open(epoch)
        while feed.remaining:
            feed.deal([min(group_cases.BATCH, feed.remaining)])
            x, y = samples[torch.from_numpy(feed.indices(feed.queue(0)))]
            feed.consume([len(x)])
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    with torch.no_grad():
        x, y = group_cases.data(37)[:]
        evaluated, predicted = group_cases.score(model)(x, y), model(x)
    return {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "losses": losses,
        "norms": norms,
        "evaluated": {"right": float(evaluated["right"]), "loss": float(evaluated["loss"].mean()), "count": 37},
        "predicted": predicted.tolist(),
    }


def close(ours: Any, theirs: Any) -> bool:
    return bool(np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-12)


def must_equal_one_machine(told: list[dict[str, Any]]) -> None:
    for value in told:
        for name in ("parameters", "losses", "norms", "predicted"):
            assert close(value[name], alone()[name]), name
        assert close([*value["evaluated"].values()], [*alone()["evaluated"].values()])
        assert value["parameters"] == told[0]["parameters"], "replicas are not equal bit for bit"
        assert all(rows in (group_cases.BATCH, group_cases.LENGTH % group_cases.BATCH) for rows in value["rows"])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "sizes", [(2, 2), (1, 2), pytest.param((2, 3), marks=LONG)], ids=["2 x 2", "1 beside 2", "2 beside 3"]
)
def test_in_any_grouping_the_training_is_one_machines_in_float64(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    told = run_groups(CASE, sizes, tmp_path)
    must_equal_one_machine(told)
    assert [value["leader"] for value in told] == [True] + [False] * (sum(sizes) - 1)
    assert [value["place"] for value in told] == [[rank, 2] for rank, size in enumerate(sizes) for _ in range(size)]
    run = read_log(tmp_path / "run")
    assert all(entry.sound and entry.whole and entry.counted == group_cases.LENGTH for entry in audit(run))
    assert {record.samples for record in run.records if sum(record.samples) == 20} == {(5, 15)}, "shares of workers"


def test_a_process_holds_its_part_of_parameters_and_optimiser_alone(tmp_path: Path) -> None:
    whole, *_ = run_groups(CASE, (1,), tmp_path / "one", args={"pace": "adaptive"})
    halves = run_groups(CASE, (2,), tmp_path / "two", args={"pace": "adaptive"})
    must_equal_one_machine([whole])
    must_equal_one_machine(halves)
    assert sum(half["bytes"] for half in halves) == whole["bytes"]
    assert max(half["bytes"] for half in halves) < 0.6 * whole["bytes"]


def test_for_any_shares_weights_and_frozen_layers_ten_steps_equal_one_machines(tmp_path: Path) -> None:
    cases = [case | {"shard": True} for case in random_cases(6, "float64", seed=4)]
    told = run_groups("exact_cases.py:train_all", (2, 1, 2), tmp_path, args=cases)
    for number, one in enumerate(cases):
        ours = told[0][number]
        batches = list(exact_cases.batches_of(one, ours["batches"]))
        parameters, losses = exact_cases.one_machine(one, batches)
        assert close(ours["parameters"], parameters.tolist()), one
        assert close(ours["losses"], losses), one
        assert all(other[number] == ours for other in told), "processes disagree on parameters, losses or records"


def test_a_script_may_divide_its_model_itself(tmp_path: Path) -> None:
    must_equal_one_machine(run_groups(CASE, (2, 2), tmp_path, args={"by_hand": True}))


@pytest.mark.parametrize("sizes", [(3,), (1, 2), pytest.param((2, 2), marks=LONG)])
def test_a_checkpoint_of_two_by_two_loads_on_any_grouping(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    saved = str(tmp_path / "saved")
    run_groups(CASE, (2, 2), tmp_path / "first", args={"save_at": 5, "save": saved})
    assert (Path(saved) / ".metadata").exists(), "torch.distributed.checkpoint reads it too"
    pace = "fixed:1,3" if len(sizes) == 2 else "adaptive"
    told = run_groups(CASE, sizes, tmp_path / "then", args={"load": saved, "pace": pace})
    for value in told:
        assert close(value["parameters"], alone()["parameters"])
        assert close(value["losses"], alone()["losses"][6:])


def test_it_loads_without_groups_too_and_torch_reads_it_by_itself(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    saved = str(tmp_path / "saved")
    told = run_groups(CASE, (2,), tmp_path / "first", args={"save_at": 5, "save": saved, "pace": "adaptive"})
    with Crew(CASE, 1, tmp_path / "then", args={"load": saved, "pace": "adaptive", "shard": False}) as crew:
        (outcome,) = crew.wait()
    assert outcome.code == 0, outcome.err
    assert close(outcome.value["parameters"], alone()["parameters"])
    weight = {"models.0.first.weight": torch.zeros(group_cases.WIDTH, 12, dtype=torch.float64)}
    dcp.load(weight, checkpoint_id=saved, no_dist=True)
    first = told[0]["parameters"][: weight["models.0.first.weight"].numel()]
    assert weight["models.0.first.weight"].flatten().tolist() == first
    (next(Path(saved).glob("*.distcp"))).write_bytes(b"cut off")
    with Crew(CASE, 1, tmp_path / "cut", args={"load": saved, "pace": "adaptive", "shard": False}) as crew:
        (outcome,) = crew.wait()
    assert "is not a whole checkpoint: its file" in outcome.err


@pytest.mark.long
def test_what_is_saved_by_itself_loads_on_another_grouping(tmp_path: Path) -> None:
    folder = str(tmp_path / "auto")
    run_groups(CASE, (2, 2), tmp_path / "first", args={"autosave": folder, "save_at": 7, "save": str(tmp_path / "s")})
    told = run_groups(CASE, (2,), tmp_path / "then", args={"load": newest(folder), "pace": "adaptive"})
    assert all(close(value["parameters"], alone()["parameters"]) for value in told)


BY_RANK = {"PACELINE_PROCS_PER_WORKER": "2", "PACELINE_DEVICE": "cpu"}


def test_ranks_of_a_launcher_that_knows_no_groups_are_workers_in_turn(tmp_path: Path) -> None:
    with Crew(CASE, 4, tmp_path, env={**BY_RANK, "QUICK_EXIT": "1"}) as crew:
        outcomes = crew.wait()
    assert all(outcome.code == 0 for outcome in outcomes), outcomes
    must_equal_one_machine([outcome.value for outcome in outcomes])
    with Crew(CASE, 3, tmp_path / "odd", env=BY_RANK) as crew:
        assert all("do not make whole groups of 2" in outcome.err for outcome in crew.wait())


def test_what_several_processes_cannot_do_is_refused_in_a_sentence(tmp_path: Path) -> None:
    said = run_groups("group_cases.py:refused", (2,), tmp_path)
    for told in said:
        assert [next((word for word in WORDS if word in text), text) for text in told] == list(WORDS)


WORDS = (
    "use pace 'auto' or 'adaptive'",
    "use combine 'gradients'",
    "fleet.model(net, shard=True)",
    "use GroupNorm or LayerNorm",
    "is an IterableDataset",
    "give a number",
    "cannot write /proc/none/saved",
    "step.backward(loss, weight=0)",
    "add the losses up",
    "give a finite loss",
    "use the optimiser's weight_decay",
    "step.commit clips",
    "used unlike parameters",
    "unlike learning rates",
    "the processes of a worker disagree in order",
)


def test_a_call_that_one_process_makes_alone_is_named(tmp_path: Path) -> None:
    with Groups("group_cases.py:astray", (2,), tmp_path) as groups:
        outcomes = groups.wait()
    assert "every process of a worker must make the same calls" in "".join(outcome.err for outcome in outcomes)


def test_in_a_fleet_without_groups_a_model_is_not_divided(tmp_path: Path) -> None:
    with Crew(CASE, 2, tmp_path) as crew:
        outcomes = crew.wait()
    assert all("start the run with `paceline run --procs-per-worker 2`" in outcome.err for outcome in outcomes)


# -- workers that come and go --------------------------------------------------------------------------------------

ELASTIC = "elastic_cases.py:train"


def test_a_group_that_is_killed_is_done_without_and_comes_back_whole(tmp_path: Path) -> None:
    with GroupFlock(ELASTIC, 3, tmp_path, args={"shard": True, **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.kill(1)
        flock.wait_for_workers(2)
        flock.start(1)
        flock.wait_for_workers(3)
        flock.kill_follower(0)
        flock.wait_for_workers(2)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={1, 2}, epochs=12)
    assert [len(change.workers) for change in run.changes] == [2, 3, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    "point", ["in work", "in round", pytest.param("after round", marks=LONG), pytest.param("after commit", marks=LONG)]
)
def test_a_process_of_a_group_may_die_at_any_point_of_a_step(tmp_path: Path, point: str) -> None:
    args = {"shard": True, "die": {"0": [[point, 7]]}, "evaluate": 5, "save": 9}
    with GroupFlock(ELASTIC, 3, tmp_path, args=args) as flock:
        outcomes = flock.wait()
    must_be_sound(tmp_path, outcomes, ended={1, 2})


@pytest.mark.long
def test_a_group_asked_to_leave_does_its_share_and_leaves(tmp_path: Path) -> None:
    with GroupFlock(ELASTIC, 2, tmp_path, args={"shard": True, **UNHURRIED}) as flock:
        flock.wait_for_step(8)
        flock.send(0, signal.SIGTERM)
        flock.wait_for_end(0)
        outcomes = flock.hurry()
    run = must_be_sound(tmp_path, outcomes, ended={1}, epochs=12)
    assert outcomes[0].code == 143, outcomes[0].err
    assert run.changes[0].left[0].text == "left (SIGTERM)"
