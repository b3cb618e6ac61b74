"""Trainings whose rounds close at a deadline, with stalls inside the user's forward, and what each worker saw."""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import random
import time
from typing import Any

import torch
from exact_cases import Net, Tokens
from gpu_cases import share_one_gpu
from torch import nn

import paceline
from paceline.pace import Ask
from paceline.records import Plan, StepRecord
from paceline.step.checks import sameness
from paceline.step.late import catch_up
from paceline.transport.engines.small_sums import SmallExchange

CYCLES_PER_S = 1.8e9
"""About what a GPU's clock makes."""


class Deadline:
    """Deals more than is needed, equally, and closes every round at one deadline (or with so many arrivals)."""

    name = "deadline"
    deadlines = True

    def __init__(
        self,
        deadline_s: float | None = 0.1,
        *,
        wait_for: int | None = None,
        decided: int | None = None,
        over: float = 1.0,
        calm: int = 0,
        least_count: float = 0.0,
    ) -> None:
        self.deadline_s, self.wait_for, self.over, self.calm = deadline_s, wait_for, over, calm
        self.least_count, self.decided = least_count, decided

    def check(self, workers: int) -> None:
        return

    def observe(self, record: StepRecord) -> None:
        return

    def plan(self, ask: Ask) -> Plan:
        calm = bool(self.calm) and ask.step % self.calm == 0
        total = ask.total if calm or ask.last else round(ask.total * self.over)
        size = len(ask.workers)
        samples = tuple(total // size + (rank < total % size) for rank in range(size))
        until = {"deadline_s": self.deadline_s, "wait_for": self.wait_for, "least_count": self.least_count}
        bounded = {} if calm else until
        return Plan(generation=ask.generation, step=ask.step, samples=samples, **bounded)  # type: ignore[arg-type]

    def recount(self, ask: Ask, share: int) -> int | None:
        return self.decided

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        return


class Stalls:
    """Sleeps inside forward: a little always, long at the given places of this worker.

    At (rank, step, micro-batch) it sleeps for ``long_s``. With a fourth number it is stuck there, or at its next
    micro-batch, until so many rounds have closed without it, and for ``linger_s`` more. In a kernel, which nothing
    ends, it is stuck for ``long_s``, and in its next steps for twice as long each time, until a record shows it.
    """

    def __init__(self, rank: int, case: dict[str, Any], steps: Any = None) -> None:
        self.each_s, self.long_s = case.get("each_s", 0.004), case.get("long_s", 0.5)
        self.linger_s, self.steps = case.get("linger_s", 0.0), steps
        mine = [tuple(place[1:]) for place in case.get("stalls", ()) if place[0] == rank]
        self.places = {place for place in mine if len(place) == 2}
        self.traps = sorted(place for place in mine if len(place) == 3)
        self.stuck: list[int] = []
        """The steps in which it was stuck."""
        self.others_wait = case.get("evaluate_after", math.inf) + 1
        """The others do not go beyond this step without it."""
        self.dice = random.Random(f"{case.get('seed', 0)}/{rank}")
        self.chance = case.get("chance", 0.0)
        self.rank, self.kernel = rank, case.get("kernel") and torch.cuda.is_available() and rank == 0
        self.step = self.micro = -1

    def begin(self, step: int) -> None:
        self.step, self.micro = step, -1

    def wait(self) -> None:
        self.micro += 1
        if self.traps and (self.step, self.micro) >= self.traps[0][:2]:
            if self.kernel:
                self._be_stuck_in_kernel(self.traps[0][2])
            else:
                self._be_stuck(self.traps.pop(0)[2])
        stalled = (self.step, self.micro) in self.places or self.dice.random() < self.chance
        time.sleep(self.long_s if stalled else self.each_s)

    def _be_stuck_in_kernel(self, rounds: int) -> None:
        """The host goes on at once, so that one kernel per step is started."""
        behind = [record.behind[self.rank] for record in self.steps.training.recent if record.behind]
        if max(behind, default=0) >= rounds - 1:
            self.traps.pop(0)
        elif self.step not in self.stuck:
            seconds = self.long_s * 2 ** len(self.stuck)
            self.stuck.append(self.step)
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def _be_stuck(self, rounds: int) -> None:
        self.stuck.append(self.step)
        books, given_up = self.steps.training, time.monotonic() + 60.0
        while books.index < min(self.step + rounds, self.others_wait) and not books.finished:
            if time.monotonic() > given_up:
                faulthandler.dump_traceback()  # of all threads: where is the proxy?
                raise AssertionError(f"the others wait for a worker that is stuck in step {self.step}")
            time.sleep(0.005)
        time.sleep(self.linger_s)


def bound_kept_sums(case: dict[str, Any]) -> None:
    """Let the workers named in ``case`` keep so many bytes of sums of rounds that they have yet to take over."""
    catch_up.MOST_BYTES = case.get("most_bytes", {}).get(os.environ.get("RANK"), catch_up.MOST_BYTES)


def ask_late_for_sums(case: dict[str, Any]) -> None:
    """Let worker 1 ask a second later than it could for some of the sums that it has given its part to."""
    plain, numbers = SmallExchange._run, itertools.count()

    def run(exchange: SmallExchange, check: Any) -> None:
        if next(numbers) in case.get("asks_late", ()) and os.environ.get("RANK") == "1":
            time.sleep(1.0)
        plain(exchange, check)

    SmallExchange._run = run  # type: ignore[method-assign]


def train_over_nccl(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(share_one_gpu(os.environ["RANK"]))
    return train(case)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training; ``case`` says how, and the result is what this worker saw."""
    bound_kept_sums(case)
    ask_late_for_sums(case)
    sameness.COMPARE_EVERY = case.get("fingerprint_every", sameness.COMPARE_EVERY)
    pace = Deadline(**case.get("pace", {})) if not isinstance(case.get("pace"), str) else case["pace"]
    device = None if case.get("gpu") else "cpu"
    with paceline.join(pace, quiet=True, device=device, seed=case.get("seed", 0)) as fleet:
        torch.manual_seed(1)
        net = Net().double()
        if case.get("batch_norm"):
            net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        model = fleet.model(net)
        data = Tokens(torch.float64, case["length"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=case.get("scaler", False))
        steps = fleet.steps(
            data,
            global_batch=case["global_batch"],
            micro_batch=case["micro_batch"],
            epochs=case.get("epochs", 1),
            lr_scaling=case.get("lr_scaling", "none"),
        )._loop
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=len(steps))
        if not case.get("untracked"):
            fleet.track(optimizer=optimizer)
        fleet.track(scheduler=scheduler, ema=ema, scaler=scaler)
        if case.get("load"):
            fleet.load(case["load"])
        stalls = Stalls(fleet.rank, case, steps)
        seen: list[dict[str, Any]] = []
        evaluations: list[float] = []
        for step in steps:
            stalls.begin(step.index)
            own = 0
            for x, y, _ in step:
                stalls.wait()
                step.backward(nn.functional.cross_entropy(model(x), y))
                step.add(seen=len(x))
                own += len(x)
            step.commit(optimizer, clip_norm=case.get("clip"))
            scheduler.step()
            ema.update_parameters(model)
            seen.append(
                {
                    "index": step.index,
                    "epoch": step.epoch,
                    "share": step.share,
                    "taken": own,
                    "progress": step.progress,
                    "ends_epoch": step.ends_epoch,
                    "samples": list(step.record.samples),
                    "sums": dict(step.record.sums),
                    "ranges": step.record.ranges,
                    "behind": list(step.record.behind),
                    "deadline": step.record.deadline_s,
                    "lr": optimizer.param_groups[0]["lr"],
                    "loss": step.loss,
                }
            )
            if case.get("evaluate_every") and (step.index + 1) % case["evaluate_every"] == 0:
                evaluations.append(
                    fleet.evaluate(lambda x, y, n: {"hit": model(x).argmax(1) == y}, data, sums="hit")["hit"]
                )
            if case.get("nudge") == [fleet.rank, step.index]:
                with torch.no_grad():
                    next(iter(model.parameters())).add_(0.001)
            if case.get("save_at") == step.index:
                fleet.save(case["save"])
        return {
            "steps": seen,
            "parameters": torch.cat([p.detach().cpu().flatten() for p in model.state_dict().values()]).tolist(),
            "ema": torch.cat([p.detach().cpu().flatten().double() for p in ema.state_dict().values()]).tolist(),
            "optimizer": [value.flatten().tolist() for state in optimizer.state.values() for value in state.values()],
            "scale": scaler.get_scale(),
            "evaluations": evaluations,
            "stuck": stalls.stuck,
        }
