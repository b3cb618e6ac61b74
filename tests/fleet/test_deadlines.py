"""Rounds that close at a deadline: nobody waits, nothing finished is lost, and the invariants hold."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, run
from deadline_cases import Net, Tokens
from torch import nn

from paceline.feed import Feed

pytestmark = pytest.mark.fleet

CASE: dict[str, Any] = {
    "length": 400,
    "global_batch": 48,
    "micro_batch": 4,
    "epochs": 2,
    "pace": {"deadline_s": 0.06, "over": 1.5},
    "clip": 0.5,
    "scaler": True,
}


def check_invariants(told: list[dict[str, Any]], case: dict[str, Any]) -> None:
    """Invariants 1 to 3: all workers are bitwise equal, every sample of every epoch counts once, and one machine that
    is given the same batches gets the same parameters."""
    ours = told[0]
    for other in told[1:]:
        for key in ("parameters", "ema", "optimizer", "scale", "evaluations"):
            assert other[key] == ours[key], f"workers disagree on {key}"
        same = ("index", "epoch", "progress", "ends_epoch", "samples", "sums", "ranges", "lr", "loss")
        assert [[step[k] for k in same] for step in other["steps"]] == [[s[k] for k in same] for s in ours["steps"]]
    counted = positions(ours["steps"])
    epochs = case.get("epochs", 1)
    assert counted == Counter((epoch, p) for epoch in range(epochs) for p in range(case["length"]))
    assert all(step["sums"].get("seen", 0) == sum(step["samples"]) for step in ours["steps"])
    assert ours["steps"][-1]["progress"] == 1.0
    most = math.ceil(case["length"] / case["global_batch"])
    for epoch in range(epochs):
        assert sum(step["epoch"] == epoch for step in ours["steps"]) in (most, most - 1)
    if not case.get("batch_norm"):
        expected = one_machine(case, ours["steps"])
        error = (torch.tensor(ours["parameters"], dtype=torch.float64) - expected).abs().max()
        assert error < 1e-12, float(error)


def positions(steps: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """How often each position of each epoch counted."""
    return Counter((s["epoch"], p) for s in steps for w in s["ranges"] for a, b in w for p in range(a, b))


def one_machine(case: dict[str, Any], steps: list[dict[str, Any]]) -> torch.Tensor:
    """The same batches in plain torch."""
    torch.manual_seed(1)
    model, data = Net().double(), Tokens(torch.float64, case["length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    most = math.ceil(case["length"] / case["global_batch"]) * case.get("epochs", 1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=most)
    feed = Feed(case["length"], workers=1, seed=case.get("seed", 0))
    for step in steps:
        feed.open(step["epoch"])
        batch = feed.indices([tuple(part) for worker in step["ranges"] for part in worker]).tolist()
        if batch:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            if case.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            rate = optimizer.param_groups[0]["lr"]
            if case.get("lr_scaling") == "linear":
                optimizer.param_groups[0]["lr"] = rate * len(batch) / case["global_batch"]
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
        scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.state_dict().values()])


def test_a_worker_stuck_in_one_micro_batch_is_not_waited_for_and_catches_up(tmp_path: Path) -> None:
    case = CASE | {"stalls": [(1, 4, 1, 4)]}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    late = [step["behind"][1] for step in told[0]["steps"] if step["behind"]]
    assert max(late) >= 3, "the others went on while worker 1 was stuck"
    (stuck,) = told[1]["stuck"]
    missed = {step["index"] for step in told[1]["steps"] if step["share"] == 0}
    assert missed >= {stuck + 1, stuck + 2, stuck + 3}, "the rounds it missed came as steps without micro-batches"
    assert any(step["taken"] > 0 for step in told[1]["steps"][stuck + 4 :]), "it works again afterwards"


def test_a_late_leader_delays_nobody(tmp_path: Path) -> None:
    case = CASE | {"stalls": [(0, 4, 1, 4), (0, 12, 0, 4)]}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    assert max(step["behind"][0] for step in told[1]["steps"] if step["behind"]) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_the_invariants_hold_under_random_stalls(seed: int, tmp_path: Path) -> None:
    case = CASE | {"chance": 0.04, "long_s": 0.2, "seed": seed, "epochs": 3, "batch_norm": seed == 3}
    case["pace"] = {"deadline_s": 0.05, "over": 1.4, "calm": (0, 5, 0, 3)[seed]}
    check_invariants(run("deadline_cases.py:train", (2, 3, 4, 3)[seed], tmp_path, args=case), case)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_with_a_floor_no_step_is_thin_and_a_stuck_worker_is_not_waited_for(batch_norm: bool, tmp_path: Path) -> None:
    case = CASE | {"stalls": [(1, 3, 0, 3)], "chance": 0.02, "long_s": 0.2, "batch_norm": batch_norm}
    case["pace"] = {"deadline_s": 0.03, "least_count": 0.8}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    left = dict.fromkeys(range(2), case["length"])
    for step in told[0]["steps"]:
        least = 0.8 * min(case["global_batch"], left[step["epoch"]])
        assert step["ends_epoch"] or step["deadline"] is None or sum(step["samples"]) >= least
        left[step["epoch"]] -= sum(step["samples"])
    (stuck,) = told[1]["stuck"]
    assert [step["samples"][1] for step in told[0]["steps"][stuck + 1 : stuck + 3]] == [0, 0]
    assert any((step["deadline"] or 0) > 0.031 for step in told[0]["steps"][stuck : stuck + 3]), "some were thin"


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_worker_stuck_at_the_end_of_an_epoch_and_of_training_is_not_waited_for_with_work(
    stuck: int, tmp_path: Path
) -> None:
    case = CASE | {"stalls": [(stuck, 8, 0, 1), (stuck, 17, 0, 1)], "evaluate_every": 9}
    case["pace"] = {"deadline_s": 0.2, "over": 1.0}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    last = told[0]["steps"][-1]
    assert last["samples"][stuck] == 0 < sum(last["samples"]), "what it did not finish, the others did"


def test_a_first_so_many_cut_off_counts_whole_shares_and_waits_for_no_more(tmp_path: Path) -> None:
    case = CASE | {"pace": {"deadline_s": None, "wait_for": 2}, "stalls": [(2, 3, 0, 1), (1, 12, 2, 1)]}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    assert told[0]["steps"][3]["samples"][2] == 0, "nobody waited for the stuck worker"
    for rank, worker in enumerate(told):
        for step in worker["steps"]:
            whole = step["samples"][rank] in (0, step["share"])
            assert whole or step["ends_epoch"], "a whole share counts or not"


def test_a_count_decided_while_the_step_runs_closes_the_round_on_every_worker(tmp_path: Path) -> None:
    case = CASE | {"pace": {"deadline_s": None, "wait_for": 3, "decided": 2}, "stalls": [(2, 3, 0, 1)]}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    assert told[0]["steps"][3]["samples"][2] == 0, "planned for, stuck, and not waited for"


def test_a_worker_that_asks_late_for_a_rounds_sum_gets_it_though_the_others_are_done_with_the_next_step(
    tmp_path: Path,
) -> None:
    case = CASE | {"pace": {"deadline_s": None, "wait_for": 2}, "asks_late": [9, 19, 29]}
    check_invariants(run("deadline_cases.py:train", 3, tmp_path, args=case), case)


def test_a_round_in_which_nobody_finished_updates_nothing(tmp_path: Path) -> None:
    case = CASE | {"stalls": [(rank, 5, 0, 1) for rank in range(2)]}
    told = run("deadline_cases.py:train", 2, tmp_path, args=case)
    check_invariants(told, case)
    assert sum(told[0]["steps"][5]["samples"]) == 0


def test_a_checkpoint_pairs_the_weights_with_the_data_of_their_own_step(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    case = CASE | {"stalls": [(0, 6, 1, 1), (1, 8, 1, 4)], "save_at": 6, "save": str(path)}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    again = run("deadline_cases.py:train", 2, tmp_path, args=case | {"load": str(path), "stalls": [], "save_at": None})
    assert positions(told[0]["steps"][:7]) + positions(again[0]["steps"]) == Counter(
        (epoch, p) for epoch in range(2) for p in range(case["length"])
    )


def test_an_epoch_that_is_resumed_far_behind_keeps_its_number_of_steps(tmp_path: Path) -> None:
    """Nobody finishes anything in steps 2 to 5; the schedule of the learning rate bears no further step."""
    path = str(tmp_path / "saved.pt")
    stalls = [(rank, step, 0, 1) for rank in range(2) for step in range(2, 6)]
    case = CASE | {"stalls": stalls, "save_at": 6, "save": path}
    told = run("deadline_cases.py:train", 2, tmp_path, args=case)
    check_invariants(told, case)
    again = run("deadline_cases.py:train", 2, tmp_path, args=case | {"load": path, "stalls": [], "save_at": None})
    assert sum(step["epoch"] == 0 for step in again[0]["steps"]) in (1, 2)


def test_a_worker_far_behind_takes_over_a_peers_state(tmp_path: Path) -> None:
    case = CASE | {"stalls": [(2, 3, 0, 12)], "most_bytes": {"2": 3000}, "epochs": 3, "evaluate_every": 24}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told[:2], case)
    assert len(told[2]["steps"]) < len(told[0]["steps"]) - 3, "it did not pass through every step"
    for key in ("parameters", "ema", "optimizer", "scale", "evaluations"):
        assert told[2][key] == told[0][key], f"it is not where the others are: {key}"
    rates = {step["index"]: step["lr"] for step in told[0]["steps"]}
    assert all(step["lr"] == rates[step["index"]] for step in told[2]["steps"])


def test_where_a_copy_would_be_incomplete_the_others_wait_for_a_worker_far_behind(tmp_path: Path) -> None:
    case = CASE | {"stalls": [(2, 3, 0, 4)], "linger_s": 0.6, "most_bytes": {"2": 3000}, "untracked": True}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    check_invariants(told, case)
    assert 3 <= max(step["behind"][2] for step in told[0]["steps"] if step["behind"]) < 6


def test_replicas_that_drifted_apart_are_refused_under_deadlines_too(tmp_path: Path) -> None:
    case = CASE | {"nudge": [1, 4], "fingerprint_every": 6, "pace": {"deadline_s": 30.0, "over": 1.0}}
    with Crew("deadline_cases.py:train", 3, tmp_path, args=case, env={"QUICK_EXIT": "1"}) as crew:
        ended = crew.wait()
    for outcome in ended:
        assert outcome.code != 0
        # The step after the comparison waits for everybody.
        assert "in step 7 worker 1 does not hold what worker 0 does: parameter " in outcome.err


@pytest.mark.parametrize("rule", ["linear", "gain"])
def test_the_learning_rate_can_follow_the_count(rule: str, tmp_path: Path) -> None:
    case = CASE | {"lr_scaling": rule, "stalls": [(1, 4, 1, 4)]}
    told = run("deadline_cases.py:train", 3, tmp_path, args=case)
    assert told[0]["parameters"] == told[1]["parameters"] == told[2]["parameters"]
    if rule == "linear":
        expected = one_machine(case, told[0]["steps"])
        assert (torch.tensor(told[0]["parameters"], dtype=torch.float64) - expected).abs().max() < 1e-12
