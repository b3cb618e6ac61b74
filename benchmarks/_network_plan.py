"""How far a plan is from a run: three fleets over the switch, each foretold from its machines, links and model alone.

Machines are emulated (a worker's compute sleeps), links are the switch's: one site, two sites with a slow link between
them, and cables that are all slow. What ``paceline plan`` says of each (`paceline.simulate.planning`) is compared with
what a fleet under "adaptive" does; *plan_error* is ``|planned / real - 1|``, the largest of the three.

    python benchmarks/_network_plan.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _computers import is_worker, leave_result, run_on
from _smoke import goes_without, smoke
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.machines.link import Link
from paceline.observe import read_log
from paceline.simulate.planning.choices import Player, choices
from paceline.simulate.planning.fleet_spec import FleetSpec, MachineKind, TrainedModel
from paceline.simulate.planning.measured import compare_with_run
from paceline.simulate.sites import Sites

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from switch import Switch, missing

SAMPLE_S, BATCH, MICRO, STEPS, HIDDEN = 0.016, 48, 2, 32, 512
globals().update(smoke(SAMPLE_S=0.0005, STEPS=24, HIDDEN=32))


@dataclass(frozen=True)
class Planned:
    """A fleet: each computer's speed and site, every cable, and the link between two sites, if there are two."""

    speeds: tuple[float, ...]
    sites: str
    cable: Link
    between: Link | None = None

    @property
    def computers(self) -> str:
        return "abcdefgh"[: len(self.speeds)]

    def spec(self) -> FleetSpec:
        kinds = [MachineKind(name, site, 1, speed, 0.01) for name, site, speed in self._each()]
        links = {frozenset(self.sites): self.between} if self.between else {}
        return FleetSpec(tuple(kinds), Sites(dict.fromkeys(self.sites, self.cable), links), _training())

    def _each(self) -> list[tuple[str, str, float]]:
        return list(zip(self.computers, self.sites, self.speeds, strict=True))

    def arrange(self, switch: Switch) -> None:
        switch.every(bits_s=self.cable.bits_per_s, delay_s=self.cable.delay_s)
        if self.between:
            near, far = ([name for name, site, _ in self._each() if site == one] for one in sorted(set(self.sites)))
            switch.link(near, far, bits_s=self.between.bits_per_s, delay_s=self.between.delay_s - self.cable.delay_s)


FLEETS = {
    "one_site": Planned((1.0, 1.0, 2.0), "xxx", Link(400e6, 0.0005)),
    "two_sites": Planned((1.0, 2.0, 1.0, 1.0), "xxyy", Link(400e6, 0.0005), Link(100e6, 0.01)),
    "slow_link": Planned((1.0, 1.0, 2.0), "xxx", Link(50e6, 0.01)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def _training() -> TrainedModel:
    size = 4 * sum(parameter.numel() for parameter in network().parameters())
    return TrainedModel(size, BATCH, SAMPLE_S, "sgd")


def foretell(fleet_of: Planned) -> dict[str, Any]:
    """One worker's part of the run; on worker 0, how far the plan was off."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same data on every worker
    data = TensorDataset(torch.randn(BATCH * STEPS, 64), torch.randint(10, (BATCH * STEPS,)))
    with paceline.join("adaptive", quiet=True) as fleet:
        sample_s = SAMPLE_S / fleet_of.speeds[fleet.rank]
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in fleet.steps(data, global_batch=BATCH, micro_batch=MICRO):
            for x, y in step:
                until = time.perf_counter() + len(x) * sample_s
                step.backward(nn.functional.cross_entropy(model(x), y))
                time.sleep(max(0.0, until - time.perf_counter()))
            step.commit(optimizer)
        leads = fleet.is_leader
    return compare_with_run(choices(Player(fleet_of.spec())), read_log(os.environ["PACELINE_RUN_DIR"])) if leads else {}


def figures() -> dict[str, Any]:
    """Three fleets, one after another."""
    found: dict[str, Any] = {}
    for name, fleet_of in FLEETS.items():
        with Switch(fleet_of.computers) as switch:
            fleet_of.arrange(switch)
            told = run_on(switch, __file__, fleet_of.computers, name)
        planned, real = told["planned_samples_per_s"], told["real_samples_per_s"]
        print(f"{name}: planned {planned:.1f}, real {real:.1f} samples/s ({told['topology']})", flush=True)
        found[f"plan_error_{name}"] = round(told["plan_error"], 3)
    return {"plan_error": max(found.values()), **found}


def main() -> None:
    if is_worker():
        leave_result(foretell(FLEETS[sys.argv[1]]))
    elif not goes_without("computers of their own", here=not missing()):
        print(json.dumps(figures()))


if __name__ == "__main__":
    main()
