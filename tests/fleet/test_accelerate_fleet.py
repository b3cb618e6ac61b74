"""Accelerate's own loop on real workers: shares 1:3 equal one process, evaluations count each sample once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crew, nursery, run
from flock import Flock, sound
from scripts import run as run_script

from ports import own_port

if find_spec("accelerate") is None:
    pytest.skip("needs pip install 'paceline[accelerate]'", allow_module_level=True)

from accelerate_cases import SAMPLES

pytestmark = pytest.mark.fleet
UNEQUAL = "fixed:1,3"


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Every worker would take seconds to import it."""
    nursery().load("paceline.adapters.accelerate")


def workers(case: str, folder: Path, size: int = 2, **args: Any) -> list[Any]:
    given = {"pace": UNEQUAL if size == 2 else None, "folder": str(folder), **args}
    return run(f"accelerate_cases.py:{case}", size, folder / f"of{size}", args=given)


def alone(case: str, folder: Path, **args: Any) -> Any:
    """One process without the fleet."""
    (value,) = run(f"accelerate_cases.py:{case}", 1, folder / "plain", args={"plain": True, **args})
    return value


def apart(ones: Any, others: Any) -> float:
    return float(np.abs(np.array(ones) - np.array(others)).max())


@pytest.mark.parametrize(
    ("fleet", "one"),
    [
        ({"batch": 4, "clip": 0.1}, {"batch": 8, "clip": 0.1}),
        ({"batch": 2, "accumulate": 2}, {"batch": 8}),
        ({"batch": 4, "samples": 48, "before": 1, "clip_value": 0.01},) * 2,
        ({"batch": 4, "samples": 41, "pace": "fixed:1,0", "clip": 0.1}, {"batch": 8, "samples": 41, "clip": 0.1}),
    ],
    ids=["clipped", "accumulated", "prepared at once", "without a share"],
)
def test_updates_equal_those_of_one_process(fleet: dict[str, Any], one: dict[str, Any], tmp_path: Path) -> None:
    both = workers("trained", tmp_path, **fleet)
    other = alone("trained", tmp_path, **{**one, "batch": 8})
    assert both[0]["weights"] == both[1]["weights"]
    assert apart(both[0]["weights"], other["weights"]) < 1e-12
    assert both[0]["rate"] == both[1]["rate"] == pytest.approx(other["rate"], abs=1e-15)
    assert both[0]["updates"] == both[1]["updates"] == other["updates"], "the script's own code runs in every update"
    assert both[0]["norms"] == pytest.approx(other["norms"], rel=1e-12)


def test_an_average_by_hand_moves_once_per_update_or_is_refused(tmp_path: Path) -> None:
    first, second = workers("averaged", tmp_path, batch=4, how="guarded")
    assert first == second
    assert apart(first["average"], alone("averaged", tmp_path, batch=8, how="guarded")["average"]) < 1e-12
    for how in ("lerp", "data"):
        args = {"pace": UNEQUAL, "batch": 4, "how": how}
        with Crew("accelerate_cases.py:averaged", 2, tmp_path / how, args=args) as crew:
            texts = [one.err for one in crew.wait()]
        assert all("average was changed" in text and "sync_gradients" in text for text in texts), texts


@pytest.mark.parametrize("pace", ["fixed:1,0", "fixed:1,3"])
def test_a_worker_without_a_share_gets_a_complete_batch_that_counts_in_no_metric(pace: str, tmp_path: Path) -> None:
    first, second = workers("popped", tmp_path, pace=pace)
    assert first == second
    assert first["seen"] == [8, 8, 8, 8, 8, 1] * 2


@pytest.mark.parametrize(("batch", "accumulate"), [(4, 1), (2, 2)])
def test_losses_over_tokens_count_by_their_tokens(batch: int, accumulate: int, tmp_path: Path) -> None:
    both = workers("tokens", tmp_path, batch=batch, accumulate=accumulate)
    assert both[0] == both[1]
    assert apart(both[0], alone("tokens", tmp_path, batch=8)) < 1e-12


@pytest.mark.parametrize(("test", "by_speed"), [(23, False), (11, False), (1, False), (23, True)])
def test_an_evaluation_counts_each_sample_once_in_the_datasets_order(test: int, by_speed: bool, tmp_path: Path) -> None:
    first, second = workers("evaluated", tmp_path, test=test, by_speed=by_speed)
    for value in (first, second):
        assert value["seen"] == [list(range(test))] * 2
        assert value["loss"] == pytest.approx(value["whole"], rel=1e-12), "repeated by the batch size, as scripts do"
    assert first["weights"] == second["weights"]
    assert len(first["sizes"]) == len(second["sizes"]), "calls in the loop meet"
    if not by_speed:
        assert 2 * first["length"] == len(first["sizes"])


@pytest.mark.parametrize("main", [False, True])
def test_a_training_goes_on_in_mid_epoch_with_another_number_of_workers(main: bool, tmp_path: Path) -> None:
    """Scripts save on all workers, or on the main process alone."""
    (whole,) = workers("resumed", tmp_path / "whole", 1)
    saved = str(tmp_path / "state")
    before = workers("resumed", tmp_path / "two", state=saved, save_at=8, end_at=8, on_main_process=main)
    (after,) = workers("resumed", tmp_path / "one", 1, load=saved)
    assert whole["updates"] == after["updates"] == 18
    assert apart(whole["weights"], after["weights"]) < 1e-12
    assert whole["rate"] == after["rate"]
    seen = [*before[0]["seen"], *before[1]["seen"], *after["seen"]]
    assert sorted(seen) == sorted(list(range(SAMPLES)) * 3), "each sample once in each epoch"


def test_one_workers_checkpoint_at_an_epochs_last_update_is_gone_on_from_by_two(tmp_path: Path) -> None:
    (whole,) = workers("resumed", tmp_path / "whole", 1)
    saved = str(tmp_path / "state")
    workers("resumed", tmp_path / "one", 1, state=saved, save_at=6, end_at=6)
    after = workers("resumed", tmp_path / "two", load=saved)
    assert after[0]["weights"] == after[1]["weights"]
    assert after[0]["updates"] == 18
    assert apart(whole["weights"], after[0]["weights"]) < 1e-12


def test_what_workers_do_together(tmp_path: Path) -> None:
    first, second = workers("together", tmp_path)
    assert (first["rank"], second["rank"], first["size"]) == (0, 1, 2)
    for value in (first, second):
        assert (value["gather"], value["mean"], value["max"]) == ([0, 1, 1], [1.5], [1, 5])
        assert value["order"] == ["0", "1"]
        assert (value["before"], value["trigger"], value["after"]) == (False, True, False)
    assert (first["padded"], second["padded"]) == ([0, -1], [0, 1])
    assert (first["mine"], second["mine"]) == ([0, 1, 2], [3, 4])
    assert "main" in first
    assert "main" not in second


@pytest.mark.parametrize(("size", "before"), [(2, False), (3, True)])
def test_free_functions_of_accelerate_are_the_fleets(size: int, before: bool, tmp_path: Path) -> None:
    everyone = workers("free", tmp_path, size, before=before)
    ranks = list(range(size))
    for rank, found in enumerate(everyone):
        assert found["first"] == ([rank, size] if before else None), "the launcher's process group, before the fleet"
        assert (found["rank"], found["size"], found["kind"], found["order"]) == (rank, size, True, "0")
        assert found["gather"] == [float(one) for one in ranks for _ in range(one + 1)]
        assert found["gather one"] == ranks
        assert found["sum"] == [size, sum(ranks)]
        assert found["mean"] == [1, sum(ranks) / size]
        assert found["max"] == [1, size - 1]
        assert found["broadcast"] == [1.5]
        assert [[one, held["text"]] for one, held in found["objects"]] == [[one, "ab"] for one in ranks]
        assert found["list"] == [1, "run1", [1]]
        assert found["padded"] == [rank] * (rank + 1) + [-1] * (size - rank - 1)
        assert found["copied"] == [1, 2, 3]
        assert found["states"] == [[size, rank, rank == 0, rank == size - 1, True]] * 3
        assert found["part"][:2] == ([0, 1] if rank == 0 else [2 * rank + 1, 2 * rank + 2])
        assert len(found["part"]) == 3
        assert found["seed"] == 5 + rank
        assert found["drawn"] == everyone[0]["drawn"]
        assert found["logged"] == (["once", "each"] if rank == 0 else ["each"])
        assert found["checked"] == [1.0] * (2 * size)
        assert "plain values" in found["refused"][0]
        assert "no process" in found["refused"][1]
        assert "end_training" in found["refused"][2]


def test_free_functions_where_workers_come_and_go(tmp_path: Path) -> None:
    with Flock("accelerate_cases.py:free_elastic", 2, tmp_path / "free") as flock:
        values = [one.value for one in flock.wait().values()]
    for found in values:
        assert found["list"] == ["a"]
        assert found["gather"] == 2
        assert [text.split()[0] for text in found["refused"]] == [
            "accelerate.utils.reduce",
            "accelerate.utils.broadcast",
            "split_between_processes",
        ]


def test_a_state_from_before_that_knows_of_no_fleet_is_refused(tmp_path: Path) -> None:
    assert all("has counted 1 process(es), and the fleet has 2" in text for text in workers("early_state", tmp_path))
    with Flock("accelerate_cases.py:early_state", 1, tmp_path / "elastic") as flock:
        (found,) = flock.wait().values()
    assert "make the Accelerator first" in found.value


def test_each_public_attribute_is_supported_or_refused_in_a_sentence(tmp_path: Path) -> None:
    for found in workers("walked", tmp_path):
        refused = {name: text for name, text in found.items() if text != "ok"}
        assert set(refused) == REFUSED
        assert all(len(text.split()) > 6 for text in refused.values()), refused


REFUSED = {
    "backward",
    "lomo_backward",
    *(f"{name}_rank" for name in ("context_parallel", "data_parallel", "data_parallel_shard", "pipeline_parallel")),
    "tensor_parallel_rank",
    *(f"pickle {name}" for name in ("Accelerator", "FleetLoader", "FleetOptimizer", "FleetScheduler")),
    *(f"loader {name}" for name in ("load_state_dict", "set_sampler", "state_dict")),
    "sampler __iter__",
}
"""Backward is called outside of a training loop."""


def test_a_trigger_stops_all_workers_at_one_update_and_another_training_follows(tmp_path: Path) -> None:
    first, second = workers("stopped", tmp_path)
    assert first["updates"] == second["updates"] == [3, 6]


def test_a_killed_leader_comes_back_to_the_right_update(tmp_path: Path) -> None:
    with Flock("accelerate_cases.py:elastic", 3, tmp_path, args={"epochs": 40}) as flock:
        flock.wait_for_step(8)
        flock.kill(0)
        flock.wait_for_workers(2)
        flock.start(0)
        flock.wait_for_workers(3)
        outcomes = flock.hurry()
    _, values = sound(tmp_path, outcomes, ended={0, 1, 2}, epochs=40, length=SAMPLES)
    assert values[0] == values[1] == values[2]
    assert values[0]["updates"] == values[0]["counted"] >= 240, "two ways to count where workers come and go"


def test_accelerate_launch_starts_a_fleet(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    options = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port")
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *options, str(own_port()))
    cpu = {"ACCELERATE_USE_CPU": "1", "PACELINE_DEVICE": "cpu", "HF_HOME": str(tmp_path / "settings")}
    script = run_script("accelerate_digits.py", "--epochs", 1, folder=tmp_path, launcher=launcher, **cpu)
    assert "2 workers" in script.err + "\n".join(script.out)
    assert len([line for line in script.out if line.startswith("epoch 0")]) == 1


def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    saved = str(tmp_path / "state")
    first = workers("example", tmp_path / "two", args=["--epochs", "2", "--save", saved])
    assert "epoch 1" in first[0]
    assert first[1] == "", "only the leader speaks"
    (after,) = workers("example", tmp_path / "one", 1, args=["--epochs", "2", "--resume", f"{saved}/epoch_1"])
    assert "epoch 0" not in after
    accuracy = float(after.split("accuracy ")[1].split("%")[0])
    assert accuracy > 85
