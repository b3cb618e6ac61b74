"""What ``paceline run --ray`` and ``paceline.adapters.ray.run`` are asked, and what they answer to bad input."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.adapters.ray import _bounds, run
from paceline.adapters.ray.demand import Demand, lacking, make_demand, read_demand
from paceline.cli import app

CPU_NODE = {"Alive": True, "Resources": {"CPU": 4.0}, "Labels": {"spot": "true"}}
GPU_NODE = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}, "Labels": {"zone": "b"}}
DEAD_NODE = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 8.0}}


def test_resources_and_labels_are_given_to_ray_in_its_own_words() -> None:
    demand = read_demand("gpus=1, cpus=4,memory=2GB,fast_disk=0.5", "spot=true|false,zone!=b,arch!=x|y,team/role=a")
    assert demand.options() == {
        "num_cpus": 4.0,
        "num_gpus": 1.0,
        "memory": 2_000_000_000,
        "resources": {"fast_disk": 0.5},
        "label_selector": {"spot": "in(true,false)", "zone": "!b", "arch": "!in(x,y)", "team/role": "a"},
    }
    assert read_demand(None, None).options() == {"num_cpus": 1.0, "num_gpus": 0.0, "resources": {}}


@pytest.mark.parametrize(
    ("per_worker", "labels", "said"),
    [
        ("gpus", None, "'gpus' is not a resource; write such as gpus=1,cpus=4"),
        ("", None, "'' is not a resource"),
        ("gpus=-1", None, "is not a resource"),
        ("gpus=1.5", None, "more than one GPU must be a whole number"),
        ("cpus=1,cpus=2", None, "names cpus twice"),
        ("cpus=4GB", None, "has a unit that is not known; write such as cpus=4"),
        ("memory=4parsec", None, "write such as memory=8GB"),
        (None, "spot", "'spot' is not a label; write such as spot=true|false"),
        (None, "spot=a b", "is not a label"),
        (None, "spot=a,spot=b", "names spot twice; write spot=A|B for either"),
    ],
)
def test_a_need_that_makes_no_sense_is_refused_with_what_to_write(
    per_worker: str | None, labels: str | None, said: str
) -> None:
    with pytest.raises(ValueError) as error:
        read_demand(per_worker, labels)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("per_worker", "labels", "lacks"),
    [
        ("cpus=4", None, ""),
        ("gpus=1", "zone=a|b", ""),
        ("gpus=2", None, "gpus=2"),
        ("cpus=9,gpus=1,tpu=1", None, "cpus=9, tpu=1"),
        (None, "spot=false", "label spot=false"),
        ("gpus=1", "spot=true", "cpus=1, gpus=1, label spot=true together"),
        (None, "zone!=b,spot!=true", "cpus=1, label zone!=b, label spot!=true together"),
    ],
)
def test_what_no_living_node_has_is_named(per_worker: str | None, labels: str | None, lacks: str) -> None:
    assert lacking(read_demand(per_worker, labels), [CPU_NODE, GPU_NODE, DEAD_NODE]) == lacks


def test_the_arguments_of_an_actor_are_taken_as_ray_takes_them() -> None:
    assert make_demand(2, 0.5, {"disk": 1}, {"spot": "!true"}) == Demand(
        {"CPU": 2.0, "GPU": 0.5, "disk": 1.0}, {"spot": "!true"}
    )
    for bad in ({"disk": -1}, {"disk": "one"}, {"disk": float("inf")}):
        with pytest.raises(ValueError, match="disk must be a number from 0"):
            make_demand(1, 0, bad, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "bounds"), [("2:8", (2, 8)), (3, (3, 3)), ("1", (1, 1))])
def test_workers_are_the_fewest_and_the_most(workers: Any, bounds: tuple[int, int]) -> None:
    assert _bounds(workers) == bounds


@pytest.mark.parametrize("workers", ["8:2", "0:2", "many", "2:", True, -1, "2:8:9"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="2:8"):
        _bounds(workers)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ray", "auto"], "--ray needs the number of workers: give -n MIN:MAX, such as -n 2:8"),
        (["--ray", "auto", "-n", "2", "--per-worker", "gpus"], "--per-worker: 'gpus' is not a resource"),
        (["--ray", "auto", "-n", "2", "--devices", "cpu"], "--devices has no meaning with --ray"),
        (["--ray", "auto", "-n", "2:4", "--host", "0.0.0.0"], "--host has no meaning with --ray"),
        (["--labels", "spot=true"], "--labels is for workers on a Ray cluster: give --ray auto"),
        (["--ray", "auto", "-n", "2", "--runtime-env", "{"], "--runtime-env: { cannot be read"),
        (["--ray", "auto", "-n", "2", "--runtime-env", "no.yaml"], "--runtime-env: no.yaml cannot be read"),
        (
            ["--ray", "auto", "-n", "2", "--token-file", "train.py"],
            "the file train.py: a token is 8 to 1024",
        ),
        (["--ray", "nowhere", "-n", "2"], "--ray nowhere: write auto, or the head's HOST:PORT, such as 10.0.0.1:6379"),
        (["--ray", "127.0.0.1:1", "-n", "2"], "--ray 127.0.0.1:1: no Ray cluster answers there (Connection refused)"),
        (["--ray", "ray://127.0.0.1:1", "-n", "2"], "the driver must be on a node of the cluster"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "has no meaning" not in said and "--ray" in words:
        pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("train.py").touch()
    done = CliRunner().invoke(app, ["run", *words, "train.py"])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_is_looked_for_in_the_folder_that_ray_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/train.py").touch()
    (tmp_path / "env.yaml").write_text("working_dir: code\n")
    for script, said in (("train.py", "no Ray cluster answers"), ("other.py", "looked in code")):
        words = ["run", "--ray", "127.0.0.1:1", "-n", "2", "--runtime-env", "env.yaml", script]
        assert said in CliRunner().invoke(app, words).stderr


def test_without_ray_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    done = CliRunner().invoke(app, ["run", "--ray", "auto", "-n", "2:8", "train.py"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--ray needs Ray, which is not installed: pip install 'paceline[ray]'" in done.stderr
    with pytest.raises(ValueError, match="needs Ray, which is not installed"):
        run("train.py")


def test_a_run_from_python_without_a_cluster_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no Ray cluster answers there"):
        run("train.py", workers=2, address="127.0.0.1:1")
    with pytest.raises(ValueError, match="run takes a script's path or a function, got int"):
        run(3, workers=2)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
