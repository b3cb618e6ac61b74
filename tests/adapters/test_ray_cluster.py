"""A fleet on a Ray cluster of several nodes; nodes are lost, to go, and added.

Each node has a network, a disk and processes of its own. All tests share one cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import raylets
from raylets import HEAD, Raylets, wait_until

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

pytestmark = [pytest.mark.fleet, pytest.mark.skipif(bool(raylets.missing()), reason=raylets.missing())]

RUN = [sys.executable, "-m", "paceline.cli", "run", "--ray"]
SOON_S = 90.0
"""For what takes seconds: a computer under test may be busy."""


class Place:
    """The cluster, and a project on its head that the other nodes see.

    They lack the folders of its runs and of some scripts.
    """

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        self.raylets = Raylets(folder, ["a", "b", "c"], own=[self.project / "runs", self.project / "lacking"])
        for name in ("train.py", "lacking/alone.py"):
            shutil.copy(Path(__file__).with_name("ray_script.py"), self.project / name)
        self._runs: set[Path] = set()

    def start(self, *words: str, **env: str) -> Driver:
        self._runs = {*self.project.glob("runs/*")}
        (self.project / "stop").unlink(missing_ok=True)
        return Driver(self, self.raylets.command(words, folder=self.project, **env))

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run that was started last."""
        found = {*self.project.glob("runs/*")} - self._runs
        assert len(found) == 1
        return found.pop()

    def events(self, kind: str) -> list[dict[str, Any]]:
        logs = [folder / "events.jsonl" for folder in {*self.project.glob("runs/*")} - self._runs]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
        read = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in read if event["event"] == kind]

    def await_workers(self, count: int, *, steps: int = 3) -> None:
        """Wait until the last steps were of ``count`` workers."""
        wait_until(
            lambda: [len(event["workers"]) for event in self.events("step")[-steps:]] == [count] * steps,
            f"a fleet of {count}",
            SOON_S,
        )

    def must_be_sound(self) -> None:
        log = read_log(self.run_dir)
        assert all(epoch.sound for epoch in audit(log))
        assert [record.step for record in log.records] == list(range(len(log.records)))

    def nothing_is_left(self) -> None:
        """Wait until no worker, actor or watcher is left; Ray's own idle processes may stay."""
        words = ("train.py", "alone.py", "NodeWorker", "paceline.cli", "watchdog", "groups.add")
        wait_until(lambda: not self.raylets.processes(*words), "the end of all processes", 20.0)


class Driver:
    """``paceline run`` on the head, and what it has printed."""

    def __init__(self, place: Place, process: subprocess.Popen[str]) -> None:
        self.process, self._place = process, place
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for stream, lines in ((process.stdout, self.out), (process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in "".join([*self.out, *self.err]), f"{text!r} of the driver", SOON_S)

    def send(self, number: int) -> None:
        self._place.raylets.send(self.process, number)

    def wait(self) -> int:
        try:
            code = self.process.wait(SOON_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver hangs: {''.join(self.err)[-3000:]}") from None
        for thread in self._threads:
            thread.join(5.0)
        return code

    def finish(self) -> None:
        (self._place.project / "stop").touch()
        assert self.wait() == 0, "".join(self.err)[-3000:]

    @property
    def notes(self) -> str:
        return "".join(line for line in self.err if line.startswith("paceline: "))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Place]:
    """Start the cluster in a folder with a short name: Ray's sockets are in it, whose names have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder, _cluster(Path(folder)) as one:
        yield one


@contextmanager
def _cluster(folder: Path) -> Iterator[Place]:
    place = Place(folder)
    with place.raylets as nodes:
        nodes.start(HEAD, cpus=1)
        nodes.await_head()
        nodes.start("a", "--labels=spot=true")
        nodes.start("b", "--labels=spot=false")
        nodes.await_nodes("a", "b")
        yield place


@pytest.fixture
def place(cluster: Place) -> Iterator[Place]:
    """Yield the cluster, and leave nothing running to the next test."""
    yield cluster
    for command in cluster.raylets._commands:
        cluster.raylets.end(command)


def test_a_function_runs_on_the_nodes_and_its_values_come_back(place: Place) -> None:
    program = """if True:
        import os
        import train
        from paceline.adapters import ray as paceline_ray
        def work(epochs):
            print("the variable is", os.environ["GREETING"], flush=True)
            return train.train(epochs)
        env = {"env_vars": {"GREETING": "hello"}}
        result = paceline_ray.run(
            work, [2], workers=2, label_selector={"spot": "in(true,false)"}, runtime_env=env, pace="equal"
        )
        print(sorted(result.values), len({value.split()[1] for value in result.values.values()}))
        print(result.log.run["pace"], result.log.end["reason"])
    """
    driver = place.start(sys.executable, "-c", program)
    assert driver.wait() == 0, "".join(driver.err)
    printed = "".join(driver.out)
    assert "[0, 1] 1\nequal finished\n" in printed
    said = sorted(line for line in driver.out if "the variable is" in line)
    assert said == ["[1] the variable is hello\n", "the variable is hello\n"], "each line once, with our prefix"
    assert {*re.findall(r"here is (\w+)", printed)} == {"a", "b"}
    place.must_be_sound()
    place.nothing_is_left()


@pytest.mark.long
def test_a_node_is_lost_another_is_to_go_and_their_workers_return_on_others(place: Place) -> None:
    driver = place.start(*RUN, place.raylets.address, "-n", "2:3", "--per-worker", "cpus=1", "train.py")
    place.await_workers(3)
    place.raylets.kill("b")
    place.await_workers(2)
    place.raylets.start("c", "--labels=spot=true")
    place.raylets.await_nodes("c")
    place.await_workers(3)
    place.raylets.start("b")
    place.raylets.await_nodes("b")
    drain(place, place.raylets.network.address("a"))
    driver.wait_for("is to go: worker")
    place.await_workers(2, steps=1)
    place.await_workers(3)
    driver.finish()
    assert "does not answer" in driver.notes or "was lost with its node" in driver.notes
    place.must_be_sound()
    gaps = [later["t"] - earlier["t"] for earlier, later in pairwise(place.events("step"))]
    assert max(gaps) < 8.0, "the survivors did not wait for Ray's own word, nor for the worker to return"
    hosts = {text for line in driver.out for text in re.findall(r"here is (\w+)", line)}
    assert hosts == {"head", "a", "b", "c"}
    sums = {text for line in driver.out for text in re.findall(r"weights (.*)", line)}
    assert len(sums) == 1, "the replicas are equal"
    assert "every sample counted once" in "".join(driver.err)
    assert not (place.run_dir / "driver.mark").exists()
    place.nothing_is_left()


def drain(place: Place, address: str) -> None:
    """Drain a node, as an autoscaler or a cloud's notice does."""
    program = f"""if True:
        import subprocess, ray
        ray.init(log_to_driver=False)
        node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == {address!r})
        from ray.scripts.scripts import cli
        cli(["drain-node", "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test",
             "--deadline-remaining-seconds", "60"])
    """
    command = place.raylets.command([sys.executable, "-c", program], folder=place.project)
    out, err = command.communicate(timeout=SOON_S)
    assert command.returncode == 0, out + err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_stopped_or_killed_leaves_nothing_running(place: Place, number: int) -> None:
    """Some of the nine workers wait for a node meanwhile; the script is brought to the nodes by Ray."""
    driver = place.start(*RUN, "auto", "-n", "1:9", "-q", "--runtime-env", '{"working_dir": "lacking"}', "alone.py")
    wait_until(lambda: len(place.events("step")) > 3, "a few steps", SOON_S)
    driver.send(number)
    code = driver.wait()
    assert number == signal.SIGKILL or code == 128 + signal.SIGINT
    place.nothing_is_left()


@pytest.mark.long
def test_what_the_nodes_lack_is_said_in_a_line_each(place: Place) -> None:
    driver = place.start(*RUN, "auto", "-n", "1:2", "--per-worker", "gpus=1", "--labels", "spot=maybe", "train.py")
    driver.wait_for("paceline: no node has gpus=1, label spot=maybe: the workers wait until one with it comes\n")
    driver.send(signal.SIGINT)
    assert driver.wait() == 128 + signal.SIGINT
    driver = place.start(*RUN, "auto", "-n", "1:2", "--labels", "spot=true|false", "lacking/alone.py")
    assert driver.wait() == 2
    assert "".join(driver.err).count("the script 'lacking/alone.py' is not on the node") == 1
    place.nothing_is_left()
