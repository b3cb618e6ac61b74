"""P4: does dynamic weighting save elastic averaging from failing workers, on MNIST and Fashion-MNIST with a CNN?

1. *The grid*, in processes that each train many networks side by side (the library's rules and failures): k of 4 and 8
   with tau of 1, 2 and 4; overlaps of 0 to 50 % at k 4, tau 1; each with SGD, Nesterov and AdaHessian, fixed and
   dynamic weights, no failure, A (exchange lost), B (worker frozen), C (worker returns with its initial weights), three
   seeds: test accuracy and training loss of the centre over rounds. Final is the mean over the last fifth.
2. *The fleet*: AdaHessian in four real processes under ``--failures``, repeated by a twin in one process.
3. *Rounds against arrivals*: four real workers, one of them four times as slow.

    python benchmarks/papers/p4.py            # the whole grid: about 3 minutes on 16 cores
    python benchmarks/papers/p4.py --quick    # Fashion-MNIST, k 4, tau 1, no overlap: about 80 s on two cores

The last line is JSON. ``recovered_c``: of the test accuracy that fixed weights lose under C against no failures, the
part that dynamic weights keep; gains over losses, pooled over optimisers and data sets at k 4, tau 1, no overlap.
``loss_points_a`` and ``loss_points_b``: how many points dynamic weights end below fixed ones under A and B, the worst
of optimisers and data sets. ``fleet_equals_twin``: whether the fleet's centre and the twin's agree to 1e-8 in every
parameter, in double precision, under each failure model (``--quick``: C). ``dynamic_over_known_c_points``: how far
dynamic weights end above weights that know who failed, under C, on average. ``recovered_c_stale``: as ``recovered_c``
where who returns has the weights with which it went. ``from_0_points_a``: points that thresholds of 0 and 0.05 without
a warm-up end below fixed weights under A, with SGD. ``arrival_over_round_s``: time of a training by arrival
over that of one by rounds of equal shares; ``arrival_over_adaptive_s``: over that of rounds whose shares follow the
speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from _chart import PLOTS, Chart, write
from _p4_fleet import CASE, apart, hessian_is_there, launch, work
from _p4_grid import (
    FAILURES,
    OPTIMISERS,
    OVERLAPS,
    RULES,
    STALE,
    TAUS,
    WORKERS,
    Found,
    Part,
    case,
    in_parts,
    pictures,
    run_all,
)
from _replicas import Result
from _smoke import smoke, smoking

SEEDS, STEPS, QUICK_STEPS = 3, 200, 200
DATASETS = ("fashion", "mnist")
FLEET_SAMPLES, FLEET_EPOCHS = 512, 3
FLEET_FAILURES = {"A": "lost:0.333", "B": "frozen:0.15x2", "C": "restart:0.1x3"}
RACE_SAMPLES, RACE_EPOCHS, SAMPLE_MS, MACHINES = 2048, 2, 1.5, "1,1,1,4"
EQUAL = 1e-8
globals().update(
    smoke(SEEDS=1, QUICK_STEPS=20, FLEET_SAMPLES=128, FLEET_EPOCHS=1, RACE_SAMPLES=128, RACE_EPOCHS=1, SAMPLE_MS=0.1)
)


# -- the grid ----------------------------------------------------------------------------------------------------------


def grid(datasets: Sequence[str], seeds: range, steps: int, *, whole: bool, device: str) -> list[Part]:
    """Every k with every tau, and every overlap at the first of both; without ``whole`` only the first of all three."""
    points = [(k, tau, 0.0) for k in WORKERS for tau in TAUS] if whole else [(4, 1, 0.0)]
    points += [(4, 1, overlap) for overlap in OVERLAPS[1:]] if whole else []
    rows = [(rule, name, model) for rule in RULES for name in OPTIMISERS for model in FAILURES]
    extra = [("from 0", "sgd", model) for model in ("none", "A")] + [("known", name, "C") for name in OPTIMISERS]
    extra += [(rule, name, model) for rule in RULES for name in OPTIMISERS for model in STALE]
    return [
        part
        for dataset in datasets
        for k, tau, overlap in points
        for part in in_parts(
            dataset,
            k,
            [
                case(rule, tau, overlap, name, model, seed)
                for rule, name, model in rows + (extra if (k, tau, overlap) == (4, 1, 0.0) else [])
                for seed in seeds
            ],
            steps,
            device,
        )
    ]


def pick(found: Found, *, dataset: str, k: int = 4, tau: int = 1, overlap: float = 0.0, **wanted: str) -> list[Result]:
    """The seeds of one place in the grid."""
    wanted = {**wanted, "failures": (FAILURES | STALE)[wanted["failures"]]}
    chosen = [
        result
        for name, workers, result in found
        if (name, workers, result.case.settings.tau, result.case.settings.overlap) == (dataset, k, tau, overlap)
        and all(getattr(result.case, key) == value for key, value in wanted.items())
    ]
    assert chosen, (dataset, k, tau, overlap, wanted)
    return chosen


def points(results: Sequence[Result]) -> float:
    return 100 * float(np.mean([result.final for result in results]))


def spread(results: Sequence[Result]) -> float:
    return 100 * float(np.std([result.final for result in results], ddof=1)) if len(results) > 1 else 0.0


def compare(found: Found, datasets: Sequence[str]) -> dict[str, Any]:
    """The figures of fixed against dynamic weights at k 4, tau 1, no overlap."""
    gained = lost = stale_gained = stale_lost = 0.0
    below: dict[str, dict[str, float]] = {"A": {}, "B": {}}
    each: dict[str, float | None] = {}
    for dataset in datasets:
        for name in OPTIMISERS:
            at = {
                rule: {
                    model: points(pick(found, dataset=dataset, name=rule, optimiser=name, failures=model))
                    for model in FAILURES | STALE
                }
                for rule in RULES
            }
            fixed, ours = at["fixed"], at["dynamic"]
            gained, lost = gained + ours["C"] - fixed["C"], lost + fixed["none"] - fixed["C"]
            stale_gained += ours["C stale"] - fixed["C stale"]
            stale_lost += fixed["none"] - fixed["C stale"]
            each[f"{dataset} {name}"] = _part(ours["C"] - fixed["C"], fixed["none"] - fixed["C"])
            for model in "AB":
                below[model][f"{dataset} {name}"] = round(fixed[model] - ours[model], 2)
    from_0 = [
        points(pick(found, dataset=datasets[0], name=rule, optimiser="sgd", failures="A"))
        for rule in ("fixed", "from 0")
    ]
    known = [
        points(pick(found, dataset=dataset, name="dynamic", optimiser=name, failures="C"))
        - points(pick(found, dataset=dataset, name="known", optimiser=name, failures="C"))
        for dataset in datasets
        for name in OPTIMISERS
    ]
    return {
        "recovered_c": _part(gained, lost),
        "loss_points_a": max(below["A"].values()),
        "loss_points_b": max(below["B"].values()),
        "recovered_c_each": each,
        "recovered_c_stale": _part(stale_gained, stale_lost),
        "dynamic_over_known_c_points": round(float(np.mean(known)), 2),
        "from_0_points_a": round(from_0[0] - from_0[1], 1),
    }


def _part(gained: float, lost: float) -> float | None:
    """None where there was nothing to recover."""
    return round(gained / lost, 3) if lost > 0 else None


def table(found: Found, dataset: str, places: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A row a place and optimiser: final accuracy, fixed then dynamic, with its spread over seeds, under each model."""
    lines = [f"| {dataset} | optimiser | {' | '.join(FAILURES)} |", "|---" * (2 + len(FAILURES)) + "|"]
    for title, at in places:
        for name in OPTIMISERS:
            cells = []
            for model in FAILURES:
                both = [pick(found, dataset=dataset, name=rule, optimiser=name, failures=model, **at) for rule in RULES]
                cells.append(" / ".join(f"{points(one):.1f}±{spread(one):.1f}" for one in both))
            lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def charts(found: Found, dataset: str, title: str, steps: int) -> list[Chart]:
    """Test accuracy and training loss over rounds, AdaHessian, none and C, fixed and dynamic."""
    accuracy: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    for model in ("none", "A", "C"):
        for rule in RULES:
            chosen = pick(found, dataset=dataset, name=rule, optimiser="adahessian", failures=model)
            rounds = np.linspace(0, 1, len(chosen[0].curve) + 1)[1:] * steps
            label = f"{rule}, {'no failure' if model == 'none' else f'failure {model}'}"
            accuracy[label] = (list(rounds), list(100 * np.mean([one.curve for one in chosen], axis=0)))
            loss[label] = (list(rounds), list(np.mean([one.losses for one in chosen], axis=0)))
    title = f"{title}, AdaHessian, k 4, tau 1"
    return [
        Chart(title, "rounds", "test accuracy of the centre, %", accuracy),
        Chart(title, "rounds", "training loss of the centre", loss, log_y=True),
    ]


# -- real processes ----------------------------------------------------------------------------------------------------


def against_twin(models: Sequence[str]) -> dict[str, Any]:
    """The same training by a fleet and by its twin, under each failure model."""
    optimiser = "adahessian" if hessian_is_there() else "nesterov"
    if optimiser == "nesterov":
        print("pytorch_optimizer is not installed (pip install paceline[research]): the fleet trains with Nesterov")
    settings = {"tau": 2, "weights": "dynamic", "overlap": 0.25, "warm_up": 2}
    found = {}
    for model in models:
        asked = {
            "what": "twin", "dataset": "fashion", "samples": FLEET_SAMPLES, "epochs": FLEET_EPOCHS, "seed": 5,
            "settings": settings, "optimiser": optimiser, "failures": FLEET_FAILURES[model],
        }  # fmt: skip
        told = launch(asked, 4, script=__file__, failures=FLEET_FAILURES[model])
        found[model] = apart(asked, told)
        print(f"fleet against twin, {FLEET_FAILURES[model]}: {told[0]['rounds']} rounds, apart by {found[model]:.1e}")
    return {
        "fleet_equals_twin": max(found.values()) < EQUAL,
        "fleet_twin_apart": max(found.values()),
        "fleet_optimiser": optimiser,
    }


def rounds_against_arrivals() -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Four workers, one slow: rounds of equal shares, rounds of adaptive shares, and arrivals."""
    ways = {"round": ("equal", "round"), "adaptive": ("adaptive", "round"), "arrival": ("equal", "arrival")}
    asked = {
        "what": "race", "dataset": "fashion", "samples": RACE_SAMPLES, "epochs": RACE_EPOCHS, "seed": 0, "tau": 4,
        "ways": ways,
    }  # fmt: skip
    told = launch(asked, 4, script=__file__, emulate=MACHINES, sample_ms=f"{SAMPLE_MS:g}")
    curves = {name: told[0][name]["curve"] for name in ways}
    for name, curve in curves.items():
        samples, (seconds, accuracy) = [one[name]["samples"] for one in told], curve[-1]
        print(f"{name}: {seconds:.1f} s, {100 * accuracy:.1f} %, samples of each {samples}", flush=True)
    took = {name: curve[-1][0] for name, curve in curves.items()}
    figures = {
        "arrival_over_round_s": round(took["arrival"] / took["round"], 3),
        "arrival_over_adaptive_s": round(took["arrival"] / took["adaptive"], 3),
        "race_accuracy": {name: round(100 * curve[-1][1], 1) for name, curve in curves.items()},
    }
    return figures, curves


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of the grid")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"local steps of each worker: {STEPS}, quick {QUICK_STEPS}")
    parser.add_argument("--device", default="cpu", help="where the grid trains: cpu or cuda")
    parser.add_argument("--plots", type=Path, help="folder for the pictures; docs/images/papers in a whole run")
    options = parser.parse_args()
    quick = options.quick or smoking()
    torch.set_num_threads(1)
    began, steps = time.perf_counter(), options.steps or (QUICK_STEPS if quick else STEPS)
    datasets = DATASETS[:1] if quick else DATASETS
    names = {name: pictures(name).name for name in datasets}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = run_all(grid(datasets, seeds, steps, whole=not quick, device=options.device), device=options.device)
    places = [("k 4, tau 1", {})]
    if not quick:
        places += [(f"k {k}, tau {tau}", {"k": k, "tau": tau}) for k in WORKERS for tau in TAUS if (k, tau) != (4, 1)]
        places += [(f"k 4, tau 1, overlap {100 * part:g} %", {"overlap": part}) for part in OVERLAPS[1:]]
    print(f"test accuracy of the centre, %, fixed / dynamic; {steps} local steps, seeds {list(seeds)}; {FAILURES}")
    for dataset in datasets:
        print(f"\n{names[dataset]}\n{table(found, dataset, places)}")
    figures = compare(found, datasets)
    race, curves = (
        rounds_against_arrivals()
    )  # before the twin, which runs backward in this process: forks of a smoke run come before it
    figures |= against_twin("C" if quick else "ABC")
    folder = options.plots or (None if quick else PLOTS)
    if folder is not None:
        clock = {name: ([s for s, _ in curve], [100 * a for _, a in curve]) for name, curve in curves.items()}
        title = f"Fashion-MNIST, machines {MACHINES}, tau 4"
        panels = [
            *charts(found, datasets[0], names[datasets[0]], steps),
            Chart(title, "seconds", "test accuracy of the centre, %", clock),
        ]
        print(f"\nwrote {write(folder / 'p4.svg', panels)}")
    settings = {"datasets": list(names.values()), "seeds": list(seeds), "steps": steps, "failures": FAILURES}
    print(json.dumps({**figures, **race, **settings, "seconds": round(time.perf_counter() - began)}))


if __name__ == "__main__":
    work() if CASE in os.environ else main()
