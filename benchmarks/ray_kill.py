"""Nodes of a Ray cluster are lost while a training runs there: how long do the others stand still?

A cluster of nodes with a network, a disk and processes of their own (Linux namespaces) on one computer, one of them
spare. A node is killed with all that runs on it; Paceline's survivors go on, and the worker returns on the spare node.
Ray Train's TorchTrainer, with the same job, `FailureConfig` and a checkpoint every quarter of a second, starts all
workers again.

    python ray_kill.py             # 2 kills each; needs root, ip, unshare, nsenter and Ray (its extra train)
    python ray_kill.py --quick     # no Ray Train
    python ray_kill.py --smoke     # one kill of two, and no Ray Train

The last line: `survivors_s` (kill to the survivors' next step), `back_s` (kill to the first step of all workers),
`lost` and `doubled` (samples, by the audit of the run's log), `ray_train_s` and `ray_train_over_paceline` (kill to the
next step of the training). Medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
import numpy as np
import raylets
from _kill_job import SAMPLE_MS, STAMPS
from _ray_kill_job import WORKERS as WORKERS_NAME
from _smoke import goes_without, smoke, smoking
from _waiting import show, wait_for
from raylets import HEAD, Raylets

from paceline.observe import read_log
from paceline.observe.analysis.audit import audit

WORKERS, KILLS = 3, 2
globals().update(smoke(WORKERS=2, KILLS=1))
CALM_STEPS = 5
LIMIT_S = 120.0
JOB = Path(__file__).with_name("_ray_kill_job.py")


class Commit(NamedTuple):
    """One line of a worker's file."""

    at: float
    step: int
    workers: int


class Stamps:
    """What the workers have noted, by the file's name: node and process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def look(self) -> dict[str, list[Commit]]:
        files = {path.name: path.read_text() for path in self.folder.iterdir()}
        return {
            name: [_commit(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            for name, text in files.items()
        }

    def whole(self, since: float) -> dict[str, str] | None:
        """File by node, once all workers have a few steps together after ``since``."""
        calm = {
            name: theirs
            for name, theirs in self.look().items()
            if sum(one.at > since and one.workers == WORKERS for one in theirs) >= CALM_STEPS
        }
        return {name.split(".")[0]: name for name in calm} if len(calm) >= WORKERS else None


def _commit(line: str) -> Commit:
    at, step, workers = line.split()
    return Commit(float(at), int(step), int(workers))


class Hunt:
    """Kills one node after the other under a training that has begun."""

    def __init__(self, nodes: Raylets, stamps: Stamps, *, goes_on: bool) -> None:
        self._nodes, self._stamps, self._goes_on = nodes, stamps, goes_on
        self.survivors: list[float] = []
        self.back: list[float] = []

    def run(self, kills: int) -> None:
        since = 0.0
        for number in range(kills):
            before = wait_for(lambda since=since: self._stamps.whole(since), "all workers to train", within_s=LIMIT_S)
            node = sorted(before)[-1]
            at = time.monotonic()
            self._nodes.kill(node)
            show(f"node {node} is killed")
            self.survivors.append(
                wait_for(lambda at=at, node=node: self._went_on(at, node), "the next step", within_s=LIMIT_S) - at
            )
            self.back.append(
                wait_for(lambda at=at, node=node: self._all(at, node), "the return", within_s=LIMIT_S) - at
            )
            show(f"went on after {self.survivors[-1]:.2f} s, all there after {self.back[-1]:.2f} s")
            since = time.monotonic()
            if number + 1 < kills:  # the spare one of the next kill
                self._nodes.start(node)
                self._nodes.await_nodes(node)

    def _went_on(self, at: float, node: str) -> float | None:
        """The next step of survivors, without the lost one; or, when all begin again, of new processes."""
        first: list[float] = []
        for name, theirs in self._stamps.look().items():
            old = bool(theirs) and theirs[0].at < at
            if self._goes_on and old and not name.startswith(f"{node}."):
                first += [one.at for one in theirs if one.at > at and one.workers == WORKERS - 1]
            elif not self._goes_on and not old:
                first += [one.at for one in theirs]
        return min(first, default=None)

    def _all(self, at: float, node: str) -> float | None:
        """The first step of all workers, one of them new."""
        new = [theirs for theirs in self._stamps.look().values() if theirs and theirs[0].at > at]
        return min((one.at for theirs in new for one in theirs if one.workers == WORKERS), default=None)


def hunt_paceline(nodes: Raylets, folder: Path) -> tuple[Hunt, int, int]:
    """What was found, and how many samples were lost and doubled."""
    stamps = Stamps(folder / "paceline")
    variables = {STAMPS: str(stamps.folder), WORKERS_NAME: str(WORKERS)}
    words = [sys.executable, "-m", "paceline.cli", "run", "--ray", "auto", "-n", f"1:{WORKERS}"]
    words += ["--emulate", ",".join(["1"] * WORKERS), "--sample-ms", f"{SAMPLE_MS:g}"]
    words += ["--runtime-env", json.dumps({"env_vars": {**variables, **passed_on()}}), str(JOB)]
    driver = nodes.command(words, folder=folder)
    hunt = Hunt(nodes, stamps, goes_on=True)
    hunt.run(KILLS)
    nodes.send(driver, signal.SIGINT)
    driver.communicate(timeout=LIMIT_S)
    epochs = audit(read_log(next((folder / "runs").iterdir())))
    return hunt, sum(epoch.missing for epoch in epochs), sum(epoch.twice for epoch in epochs)


def hunt_ray_train(nodes: Raylets, folder: Path) -> Hunt:
    stamps = Stamps(folder / "ray_train")
    variables = {STAMPS: str(stamps.folder), WORKERS_NAME: str(WORKERS), **passed_on()}
    variables |= {"PACELINE_EMULATE": ",".join(["1"] * WORKERS), "PACELINE_SAMPLE_MS": f"{SAMPLE_MS:g}"}
    variables["GLOO_SOCKET_IFNAME"] = "eth0"  # the nodes' names lead nowhere; Paceline finds the interface by itself
    driver = nodes.command([sys.executable, str(JOB), "ray_train"], folder=folder, **variables)
    hunt = Hunt(nodes, stamps, goes_on=False)
    try:
        hunt.run(KILLS)
    finally:
        nodes.end(driver)
    return hunt


def passed_on() -> dict[str, str]:
    """Variables that the job needs on a node."""
    return {"OMP_NUM_THREADS": "1", **({"BENCHMARK_SMOKE": "1"} if smoking() else {})}


def has_ray_train() -> bool:
    try:
        importlib.import_module("ray.train")
    except ImportError:
        show("Ray Train is not installed (pip install 'ray[train]'); it is left out")
        return False
    return True


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no Ray Train")
    quick = smoking() or parser.parse_args().quick
    if goes_without(raylets.missing() or "Ray", here=not raylets.missing()):
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="ray-kill-"))
    names = [f"n{number}" for number in range(WORKERS + 1)]
    try:
        with Raylets(folder, names) as nodes:
            nodes.start(HEAD, cpus=0)
            nodes.await_head()
            for name in names:
                nodes.start(name)
            nodes.await_nodes(*names)
            hunt, lost, doubled = hunt_paceline(nodes, folder)
            figures: dict[str, float | int | None] = {
                "survivors_s": median(hunt.survivors),
                "back_s": median(hunt.back),
                "lost": lost,
                "doubled": doubled,
                "kills": len(hunt.survivors),
                "workers": WORKERS,
                "ray_train_s": None,
                "ray_train_over_paceline": None,
            }
            if not quick and has_ray_train():
                missing = {*names} - nodes.alive
                for name in missing:
                    nodes.start(name)
                nodes.await_nodes(*missing)
                theirs = median(hunt_ray_train(nodes, folder).survivors)
                figures |= {"ray_train_s": theirs, "ray_train_over_paceline": theirs / median(hunt.survivors)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


if __name__ == "__main__":
    main()
