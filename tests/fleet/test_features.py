"""What two real workers can do together: one start of the processes, many cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import feature_cases as cases
import pytest
import torch
from crew import Crew
from torch import nn

pytestmark = pytest.mark.fleet

BATCH = cases.BATCH


class Told:
    """What the two workers returned, by case."""

    def __init__(self, values: list[dict[str, Any]]) -> None:
        self._values = values

    def __call__(self, case: str) -> list[Any]:
        results = [value[case] for value in self._values]
        for rank, result in enumerate(results):
            assert not (isinstance(result, dict) and "error" in result), f"worker {rank}: {result['error']}"
        return results


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("features")
    args, env = {"folder": str(folder)}, {"QUICK_EXIT": "1"}
    with Crew("feature_cases.py:everything", 2, folder, args=args, env=env) as crew:
        outcomes = crew.wait(within=300)
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.err[-4000:] for outcome in outcomes]
    return Told([outcome.value for outcome in outcomes])


def close(ours: Any, expected: torch.Tensor, tolerance: float = 1e-12) -> bool:
    return bool((torch.tensor(ours, dtype=torch.float64) - expected).abs().max() < tolerance)


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "model"),
    [("compiled", cases.net), ("averaged", cases.net), ("channels_last", cases.convolution)],
    ids=["compiled", "with a deep copy beside it", "channels last"],
)
def test_any_kind_of_model_trains_as_on_one_machine(told: Told, case: str, model: Any) -> None:
    first, second = told(case)
    assert first == second
    assert close(first, cases.one_machine(model()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_shared_between_two_checkpoints_trains_as_on_one_machine(told: Told, reentrant: bool) -> None:
    first, second = told("checkpointed")
    assert first == second
    assert close(first[0 if reentrant else 1], cases.one_machine(cases.Shared(None)))


def test_parameters_of_three_dtypes_train_together(told: Told) -> None:
    first, second = told("dtypes")
    assert first == second
    assert close(first, cases.one_machine(cases.Mixed(), clip=0.5), tolerance=2e-2)


def test_two_models_with_two_optimizers_share_a_commit(told: Told) -> None:
    first, second = told("two_models")
    assert first == second
    expected = [cases.one_machine(cases.net()), cases.one_machine(cases.Shared(None))]
    assert close(first, torch.cat(expected))


# -- rounds --------------------------------------------------------------------------------------------------------


def whole_batch() -> nn.Module:
    """The model with the gradient of the first whole batch."""
    model = cases.net()
    cases.mse(model, *(tensor[:BATCH] for tensor in cases.data().tensors)).backward()
    return model


def test_combine_leaves_the_fleets_mean_everywhere_for_code_of_ones_own(told: Told) -> None:
    expected = torch.cat([p.grad.flatten() for p in whole_batch().parameters()])
    for result in told("custom_code"):
        assert close(result["gradient"], expected)
        assert result["moved"] == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(("number", "way"), [(0, "no clipping"), (1, "in commit"), (2, "after combine")])
def test_norm_and_clipping_are_torchs_on_every_worker(told: Told, number: int, way: str) -> None:
    model = whole_batch()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if number == 0 else 0.01)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for result in told("norms"):
        assert close(result[number]["parameters"], torch.tensor(cases.flat(model), dtype=torch.float64))
        assert result[number]["norm"] == pytest.approx(float(norm), rel=1e-10), way


def test_figures_are_summed_over_workers_that_work_and_workers_that_sit_out(told: Told) -> None:
    first, second = told("figures")
    assert first == second
    assert first == [{"both": 2.0, "rows": 12.0, "idle0": 0.5}, {"both": 2.0, "rows": 12.0, "idle1": 0.5}]


def test_running_statistics_are_merged_by_samples(told: Told) -> None:
    results = told("batch_norm")
    assert [result["samples"] for result in results] == [8, 4]
    expected = sum(torch.tensor(r["mine"], dtype=torch.float64) * r["samples"] / BATCH for r in results)
    for result in results:
        assert close(result["fleet"], expected)
        assert result["batches"] == 3


def overflowing_scaler() -> list[float]:
    """The scales of a real GradScaler in a loop whose third and fourth gradients overflow."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2), []
    for number in range(8):
        scaler.scale(weight.sum() * (float("inf") if number in (2, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(("kind", "tolerance"), [("autocast False", 1e-12), ("autocast True", 3e-2)])
def test_unlike_precisions_share_a_step_and_an_overflow_anywhere_skips_it_everywhere(
    told: Told, kind: str, tolerance: float
) -> None:
    first, second = (result[kind] for result in told("precisions"))
    assert first["parameters"] == second["parameters"]
    assert first["applied"] == second["applied"] == [number not in (2, 3) for number in range(8)]
    assert first["samples"] == second["samples"] == 96
    assert second["scales"] == overflowing_scaler()
    kept = [row for number, part in enumerate(torch.arange(96).split(BATCH)) if number not in (2, 3) for row in part]
    dataset = torch.utils.data.TensorDataset(*(tensor[kept] for tensor in cases.data(96).tensors))
    assert close(first["parameters"], cases.one_machine(cases.net(), dataset), tolerance)


# -- data ----------------------------------------------------------------------------------------------------------


def test_streams_of_unequal_length_are_drawn_to_their_ends_and_the_longest_ends_the_epoch(told: Told) -> None:
    for result, length in zip(told("streams"), (7, 19), strict=True):
        assert result["seen"] == {"0": list(range(length)), "1": list(range(length))}
        assert result["progress"][-1] == 1.0
    shares = told("streams")[0]["shares"]
    assert [sum(column) for column in zip(*shares, strict=True)] == [14, 38]


def union(results: list[Any], epoch: int) -> Counter[int]:
    return Counter(sample for result in results for sample in result["seen"].get(str(epoch), []))


@pytest.mark.parametrize(("number", "length", "steps"), [(0, 5, 1), (1, 5, 5), (2, 1, 1)])
def test_less_data_than_a_batch_and_less_batch_than_workers_simply_work(
    told: Told, number: int, length: int, steps: int
) -> None:
    results = [result[number] for result in told("short_data")]
    for epoch in range(2):
        assert union(results, epoch) == Counter(range(length))
    assert results[0]["ends"] == ([False] * (steps - 1) + [True]) * 2
    assert results[0]["progress"] == pytest.approx([(i + 1) / (2 * steps) for i in range(2 * steps)])


def test_an_order_of_ones_own_is_dealt_draw_by_draw_and_drop_last_leaves_the_end_out(told: Told) -> None:
    ordered = [result[0] for result in told("orders")]
    assert union(ordered, 0) == Counter([3, 3, 9, 0, 1])
    assert union(ordered, 1) == Counter([3, 9, 0, 1])
    dropped = [result[1] for result in told("orders")]
    for epoch in range(2):
        assert sum(union(dropped, epoch).values()) == len(union(dropped, epoch)) == 8
    assert dropped[0]["ends"] == [False, True] * 2


def test_loader_processes_and_moving_shares_keep_every_sample_exactly_once(told: Told) -> None:
    results = told("loader")
    for epoch in range(3):
        assert union(results, epoch) == Counter(range(101))
    shares = {tuple(shares) for shares in results[0]["shares"]}
    assert len(shares) > 10, "the shares never moved"


def test_the_machine_that_is_measured_to_be_slower_does_less_of_the_work(told: Told) -> None:
    results = told("measured")
    assert union(results, 0) == Counter(range(320))
    fast, slow = (sum(column) for column in zip(*results[0]["shares"], strict=True))
    assert fast > slow


def test_a_worker_with_little_memory_halves_its_micro_batches_and_changes_nothing_else(told: Told) -> None:
    first, second = told("memory")
    assert first["parameters"] == second["parameters"]
    assert close(first["parameters"], cases.one_machine(cases.net()))
    assert first["samples"] == [[6, 6]] * 4
    assert first["micro_batches"][0] == [1, 1]
    assert first["micro_batches"][-1] == [1, 2]
    model = cases.net()
    cases.one_machine(model)
    total = float(model(cases.data().tensors[0]).detach().sum())
    assert first["evaluated"] == second["evaluated"] == {"sum": pytest.approx(total, abs=1e-9), "count": 48}


def test_each_worker_finds_the_size_of_its_own_micro_batches(told: Told) -> None:
    first, second = told("sizes")
    assert first == second, "everybody knows what everybody found"
    assert close(first["parameters"], cases.one_machine(cases.net(), cases.data(12 * BATCH)))
    assert first["found"][0] == [0, 0]
    large, small = first["found"][-1]
    assert large > small == 2
    assert first["bound"] == [0, 1]
    assert [part for start, stop in first["ranges"] for part in range(start, stop)] == list(range(12 * BATCH))


# -- together ------------------------------------------------------------------------------------------------------


def test_evaluation_is_exact_for_any_shares_and_smaller_sets_than_fleets(told: Told) -> None:
    first, second = told("evaluation")
    assert first == second
    for result, length in zip(first[:3], (47, 47, 1), strict=True):
        x, y = cases.data(length).tensors
        truth, guess = (y > 0).flatten(), x[:, 0] > 0
        table = [[int(((truth == t) & (guess == g)).sum()) for g in (False, True)] for t in (False, True)]
        assert result["table"] == table
        assert result["sum"] == pytest.approx(float(y.sum()), abs=1e-12)
        assert result["mean"] == pytest.approx(float(y.mean()), abs=1e-12)
        assert result["count"] == length
    assert first[3] == {"made": True}, "what the leader made before its barrier is there after everybody's"
    assert first[4] == {"any": [True, False], "training": True}


def test_a_save_or_load_that_fails_does_so_on_every_worker_and_the_fleet_goes_on(told: Told) -> None:
    first, second = told("saving")
    assert first == second
    assert first["unwritable"].startswith("OSError: cannot write /proc/nowhere/c.pt")
    for name in ("empty", "cut", "text"):
        assert first[name].startswith("ValueError")
        assert "is not a whole checkpoint" in first[name]
    assert first["missing"].startswith("ValueError: cannot read the checkpoint")
    assert first["after"] == "[[1, 2], true]"


def test_a_fleet_in_which_only_some_scale_their_loss_can_be_saved_and_resumed(told: Told) -> None:
    first, second = told("unlike_scalers")
    assert first == second
    model = cases.net()
    cases.one_machine(model)
    assert close(first, cases.one_machine(model))


def test_a_fleet_that_was_left_takes_its_engine_with_it(told: Told) -> None:
    """A process group that waits for the garbage collector may meet it in a forked loader process, and crash it."""
    assert told("left_behind") == [{"gloo": 0}] * 2


def test_torchrun_starts_a_fleet_over_its_own_store_and_the_named_interface(tmp_path: Path) -> None:
    script = str(Path(cases.__file__))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {"OMP_NUM_THREADS": "1", "PACELINE_RUN_DIR": str(tmp_path / "run"), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"parameters of worker {rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert close(first, cases.one_machine(cases.net()))
