"""P2, WP-SGD: does it pay to weigh workers by how far behind they are when work is unequal?

Six workers, two of them emulated ten times as slow, train by themselves on Fashion-MNIST from one start, through a real
fleet (a process each), and are averaged with four rules: uniform (P2's baseline), samples, wp (P2's, reconstructed) and
mse (ours); once at the end (``Averaging(every="end")``, P2's setting) or every 0.25 s; with SGD without momentum and
with momentum 0.9 at a tenth of the rate, which goes the same way in as many steps.

- *Logistic regression* with L2 regularisation lambda, where there is an optimum F* to measure from, and where lambda
  times rate times the fast workers' steps says which regime it is: 1, all are on the way; 3, the fast have arrived and
  the slow have not, as in P2; 30, all have arrived. "Suboptimality" is ``F - F*`` over the training set.
- *A small CNN* with an ordinary weight decay of 5e-4, where it is the training loss.

``wp_over_uniform`` is the suboptimality of wp over uniform's, averaged once, in the regime of 3: below 1 wp is better.
``wp_over_uniform_momentum`` is the same with momentum, ``wp_blind_...`` that of rho = 1 - eta lambda, which does not
know of momentum. Medians over the seeds, each ratio within one seed; ``..._spread`` has its least and its largest.

    python benchmarks/papers/p2.py            # 5 seeds, a fleet each where there are cores: 3 minutes on 16, 15 on 2
    python benchmarks/papers/p2.py --quick    # 3 seeds, the regime of 3 alone, no CNN: a minute and a half on 2 cores
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _chart import PLOTS, Chart, write
from _data import Images, load, small_cnn
from _smoke import smoke, smoking
from common import emulate, is_worker, leave_result, run_workers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline

MACHINES, SAMPLE_MS, PERIOD_S = "1,1,1,1,10,10", 0.6, 0.25
BATCH, EPOCHS, SAMPLES, QUICK_SAMPLES, TESTED = 16, 2, 8000, 4800, 2000
SEEDS, QUICK_SEEDS, CORES = 5, 3, 3
"""``CORES``: that a fleet needs, so that several run side by side where there are more."""
REGIMES, HEADLINE = (1.0, 3.0, 30.0), 3.0
"""eta lambda T_max."""
RATE, CNN_RATE, CNN_DECAY, MOMENTUM = 1.0, 0.1, 5e-4, 0.9
LOOKS = 24
"""Local steps between two looks at the first worker's parameters, where nothing is averaged on the way."""
ITERATIONS = 300
RULES, BLIND = ("uniform", "samples", "wp", "mse"), "wp blind"
globals().update(
    smoke(MACHINES="1,4", SAMPLE_MS=0.02, PERIOD_S=0.05, BATCH=32, EPOCHS=1, SAMPLES=320, QUICK_SAMPLES=320, TESTED=50)
    | smoke(QUICK_SEEDS=1, LOOKS=3, ITERATIONS=5, RULES=("uniform", "wp"))
)


@dataclass(frozen=True)
class Job:
    """One training."""

    model: str
    once: bool
    regime: float
    momentum: float
    rule: str
    seed: int
    quick: bool

    @property
    def rate(self) -> float:
        """With momentum m a step goes 1 / (1 - m) times as far, in the end."""
        return (RATE if self.model == "logistic" else CNN_RATE) * (1 - self.momentum)

    @property
    def samples(self) -> int:
        return min(QUICK_SAMPLES if self.quick else SAMPLES, len(images().train_y))

    @property
    def decay(self) -> float:
        return self.regime / (RATE * longest(self.samples)) if self.model == "logistic" else CNN_DECAY

    @property
    def combine(self) -> paceline.Averaging:
        """Told of a smaller decay, by as much as momentum makes it stronger, wp has ``rho = 1 - eta lambda``."""
        blind = {"weight_decay": self.decay * (1 - self.momentum)} if self.rule == BLIND else {}
        weights = "wp" if self.rule == BLIND else self.rule
        return paceline.Averaging(every="end" if self.once else None, period_s=PERIOD_S, weights=weights, **blind)


def longest(samples: int) -> float:
    """Local steps of the fastest workers, if all are busy all the time."""
    return EPOCHS * samples / BATCH / sum(1 / float(factor) for factor in MACHINES.split(","))


def jobs(seed: int, *, quick: bool) -> Iterator[Job]:
    """All trainings of one seed."""
    for momentum in (0.0, MOMENTUM):
        for rule in RULES:
            for regime in (HEADLINE,) if quick else REGIMES:
                yield Job("logistic", True, regime, momentum, rule, seed, quick)
            if not quick or (rule in ("uniform", "wp") and seed == 0):
                yield Job("logistic", False, HEADLINE, momentum, rule, seed, quick)
            if not quick:
                yield Job("cnn", True, 0.0, momentum, rule, seed, quick)
                yield Job("cnn", False, 0.0, momentum, rule, seed, quick)
    yield Job("logistic", True, HEADLINE, MOMENTUM, BLIND, seed, quick)


# -- a worker ----------------------------------------------------------------------------------------------------------


@cache
def images() -> Images:
    """Of about the length 1 each, so that a rate of 1 is stable."""
    found = load("fashion", quiet=is_worker()).part(SAMPLES, TESTED)
    return Images(found.name, found.train_x / 28, found.train_y.clone(), found.test_x / 28, found.test_y.clone())


def network(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    if job.model == "cnn":
        return nn.Sequential(Louder(), small_cnn())
    made = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


class Louder(nn.Module):
    """The images as they were."""

    def forward(self, x: Tensor) -> Tensor:
        return 28 * x


def objective(model: nn.Module, x: Tensor, y: Tensor, decay: float) -> Tensor:
    squares = sum(((parameter**2).sum() for parameter in model.parameters()), torch.zeros(()))
    return cross_entropy(model(x), y) + decay / 2 * squares


def train(job: Job) -> dict[str, Any]:
    """One training in the fleet. With the first seed also the loss over time, which is the first worker's: at rounds
    that average, or on its own way."""
    data = images()
    looks: list[tuple[float, list[Tensor]]] = []
    with paceline.join("adaptive", combine=job.combine, seed=job.seed, quiet=True, device="cpu") as fleet:
        model = fleet.model(network(job))
        optimizer = torch.optim.SGD(model.parameters(), lr=job.rate, momentum=job.momentum, weight_decay=job.decay)
        fleet.track(optimizer=optimizer)
        part = TensorDataset(data.train_x[: job.samples], data.train_y[: job.samples])
        workers, round, began = fleet.world_size, 0, time.perf_counter()

        def look() -> None:
            looks.append((time.perf_counter() - began, [p.detach().clone() for p in model.parameters()]))

        look()
        for step in fleet.steps(part, global_batch=BATCH * workers, micro_batch=BATCH, epochs=EPOCHS):
            for x, y in step:
                # A step on the few samples that an epoch has left goes as far as they carry it, whatever the rate.
                step.backward(cross_entropy(model(x), y) * len(y) / BATCH)
            step.commit(optimizer)
            if job.seed == 0 and ((step.index % LOOKS == 0) if job.once else step.round > round):
                look()
            round = step.round
        look()
        samples = [sum(record.samples[worker] for record in fleet.history) for worker in range(workers)]
    return judged(job, looks, samples) if os.environ["RANK"] == "0" else {}


@torch.no_grad()
def judged(job: Job, looks: Sequence[tuple[float, list[Tensor]]], samples: list[int]) -> dict[str, Any]:
    data, model, losses = images(), network(job), []
    x, y = data.train_x[: job.samples], data.train_y[: job.samples]
    for _, parameters in looks:
        for own, then in zip(model.parameters(), parameters, strict=True):
            own.copy_(then)
        losses.append(float(objective(model, x, y, job.decay)))
    correct = (model(data.test_x[:TESTED]).argmax(1) == data.test_y[:TESTED]).float().mean()
    return {
        "job": asdict(job),
        "seconds": [seconds for seconds, _ in looks],
        "losses": losses,
        "accuracy": float(correct),
        "samples": samples,
    }


def measure(seeds: Sequence[int], *, quick: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    emulate(MACHINES, SAMPLE_MS)
    return [train(job) for seed in seeds for job in jobs(seed, quick=quick)]


# -- all of them -------------------------------------------------------------------------------------------------------


class Results:
    """What was measured, found by job."""

    def __init__(self, told: Sequence[dict[str, Any]], best: Callable[[Job], float]) -> None:
        self._told = {Job(**one["job"]): one for one in told}
        self._best = best

    def __iter__(self) -> Iterator[Job]:
        return iter(self._told)

    def of(self, job: Job) -> dict[str, Any]:
        return self._told[job]

    def apart(self, job: Job) -> list[float]:
        """The loss over time, from the optimum where one is known."""
        return [loss - self._best(job) for loss in self._told[job]["losses"]]

    def over_uniform(self, **what: Any) -> list[float]:
        """By seed: the end over that of uniform."""
        chosen = sorted((job for job in self if what.items() <= asdict(job).items()), key=lambda job: job.seed)
        plain = [Job(**asdict(job) | {"rule": "uniform"}) for job in chosen]
        return [self.apart(job)[-1] / self.apart(base)[-1] for job, base in zip(chosen, plain, strict=True)]


@cache
def optimum(decay: float, samples: int) -> float:
    """F* of the logistic regression, by L-BFGS on the whole training set."""
    x, y = images().train_x[:samples], images().train_y[:samples]
    model = network(Job("logistic", True, 0.0, 0.0, "uniform", 0, False))
    descent = torch.optim.LBFGS(
        model.parameters(), max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-10
    )

    def closure() -> Tensor:
        descent.zero_grad()
        loss = objective(model, x, y, decay)
        loss.backward()
        return loss

    descent.step(closure)
    return float(objective(model, x, y, decay).detach())


def best(job: Job) -> float:
    return optimum(job.decay, job.samples) if job.model == "logistic" else 0.0


def run_all(seeds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Seeds in fleets side by side, as many as there are cores for."""
    fleets = max(1, min(seeds, (os.cpu_count() or 1) // CORES))
    parts = [",".join(map(str, range(seeds)[first::fleets])) for first in range(fleets)]
    flags = ["--quick"] if quick else []

    def run(part: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = run_workers(__file__, len(MACHINES.split(",")), *flags, "--seeds", part)
        return found

    if fleets == 1:
        return run(parts[0])
    with ThreadPoolExecutor(fleets) as pool:
        return [one for found in pool.map(run, parts) for one in found]


def table(results: Results) -> Iterator[str]:
    """A line for each setting: median over seeds of the end over uniform's, with its least and largest."""
    rules = [*RULES[1:], BLIND]
    yield f"{'':38}{'uniform':>9}" + "".join(f"{rule + ' / uniform':>24}" for rule in rules)
    settings = dict.fromkeys((job.model, job.once, job.regime, job.momentum) for job in results)
    for model, once, regime, momentum in sorted(settings):
        what = {"model": model, "once": once, "regime": regime, "momentum": momentum}
        base = [
            results.apart(job)[-1] for job in results if (what | {"rule": "uniform"}).items() <= asdict(job).items()
        ]
        name = f"{model} {'once' if once else 'in rounds'}, momentum {momentum:g}" + (f", {regime:g}" if regime else "")
        cells = [results.over_uniform(**what, rule=rule) for rule in rules]
        yield f"{name:<38}{statistics.median(base):>9.4f}" + "".join(f"{_spread(cell):>24}" for cell in cells)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def accuracies(results: Results) -> Iterator[str]:
    for once in (True, False):
        for momentum in (0.0, MOMENTUM):
            found = {
                rule: [results.of(job)["accuracy"] for job in results if _is(job, "cnn", once, momentum, rule)]
                for rule in RULES
            }
            if all(found.values()):
                said = ", ".join(f"{rule} {statistics.median(values):.1%}" for rule, values in found.items())
                yield f"cnn {'once' if once else 'in rounds'}, momentum {momentum:g}, test accuracy: {said}"


def _is(job: Job, model: str, once: bool, momentum: float, rule: str, regime: float = 0.0) -> bool:
    return (job.model, job.once, job.momentum, job.rule, job.regime) == (model, once, momentum, rule, regime)


def figures(results: Results) -> dict[str, Any]:
    names = {
        "wp_over_uniform": {"momentum": 0.0, "rule": "wp"},
        "wp_over_uniform_momentum": {"momentum": MOMENTUM, "rule": "wp"},
        "wp_blind_over_uniform_momentum": {"momentum": MOMENTUM, "rule": BLIND},
        "mse_over_uniform": {"momentum": 0.0, "rule": "mse"},
        "samples_over_uniform": {"momentum": 0.0, "rule": "samples"},
        "wp_over_uniform_arrived": {"momentum": 0.0, "rule": "wp", "regime": REGIMES[-1]},
    }
    found: dict[str, Any] = {}
    for name, what in names.items():
        values = results.over_uniform(**{"model": "logistic", "once": True, "regime": HEADLINE} | what)
        if values:
            found[name] = round(statistics.median(values), 4)
            found[f"{name}_spread"] = [round(min(values), 4), round(max(values), 4)]
    done = [results.of(job)["samples"] for job in results]
    found["slow_over_fast"] = round(statistics.median(one[-1] / one[0] for one in done), 3)
    return found | {"seeds": len({job.seed for job in results}), "dataset": images().name}


def charts(results: Results) -> list[Chart]:
    """Of the first seed, but for the regimes: the median of all."""
    own = [job for job in results if job.seed == 0]

    def over_time(model: str, once: bool, momentum: float, regime: float) -> dict[str, Any]:
        curves: dict[str, Any] = {}
        alone: dict[str, Any] = {}
        for rule in RULES:
            for job in (one for one in own if _is(one, model, once, momentum, rule, regime)):
                seconds, apart = results.of(job)["seconds"], results.apart(job)
                curves[rule] = (seconds[-1:], apart[-1:]) if once else (seconds, apart)
                if once:
                    alone["the first worker alone"] = seconds[:-1], apart[:-1]
        return curves | alone

    def over_regimes(momentum: float) -> dict[str, Any]:
        what = {"model": "logistic", "once": True, "momentum": momentum}
        return {
            rule: (
                [torch.tensor(regime).log10().item() for regime in REGIMES],
                [statistics.median(results.over_uniform(**what, rule=rule, regime=regime)) for regime in REGIMES],
            )
            for rule in RULES
        }

    return [
        Chart(
            "Averaged once, momentum 0.9", "seconds", "F - F*", over_time("logistic", True, MOMENTUM, HEADLINE), True
        ),
        Chart("In rounds, momentum 0.9", "seconds", "F - F*", over_time("logistic", False, MOMENTUM, HEADLINE), True),
        Chart("Once, momentum 0.9: over uniform", "log10 of eta lambda T", "ratio", over_regimes(MOMENTUM), True),
        Chart("CNN in rounds, no momentum", "seconds", "training loss", over_time("cnn", False, 0.0, 0.0), True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 seeds, one regime, no CNN")
    parser.add_argument("--plots", type=Path, help="folder for p2.svg, of a whole run (docs/images/papers)")
    parser.add_argument("--seeds", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if is_worker():
        leave_result(measure([int(seed) for seed in asked.seeds.split(",")], quick=asked.quick))
        return
    quick = asked.quick or smoking()
    images()
    results = Results(run_all(QUICK_SEEDS if quick else SEEDS, quick=quick), best)
    print(
        f"{images().name}, machines {MACHINES}: F - F* (the CNN: training loss) at the end; median (least to largest)"
    )
    print("\n".join([*table(results), *accuracies(results)]))
    if not quick:
        write((asked.plots or PLOTS) / "p2.svg", charts(results))
    print(json.dumps(figures(results)))


if __name__ == "__main__":
    main()
