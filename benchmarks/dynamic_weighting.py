"""Does P4's dynamic weighting save elastic averaging from failing workers, and what does it cost where it need not?

Replicas of a small CNN train on digits by elastic averaging, under three failure models (A: exchanges lost, B: workers
frozen, C: workers that return with their initial weights). ``recovered_c`` is the part of the test accuracy that fixed
weights lose under C (20-round outages) against no failures, and dynamic weights keep: pooled over three local
optimisers, gains over losses. ``loss_points_a`` and ``loss_points_b`` are how many points dynamic weights end below
fixed ones under A and B: the worst of the three optimisers. Final accuracy is the centre's, the mean over the last
fifth of the evaluations. All replicas share one process; rules are compared on the same batches and failures.

    python benchmarks/dynamic_weighting.py --quick     # under a minute: k 4, tau 1
    python benchmarks/dynamic_weighting.py             # P4's grid; up to 20 minutes
    python benchmarks/dynamic_weighting.py --plots DIR # where the curves go if plotly is installed

Fashion-MNIST is used beside digits where Debian's package dataset-fashion-mnist is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _curves import draw
from _replicas import Batch, Case, Images, Progress, Result, digits, fashion, fashion_folder
from _smoke import smoke, smoking

from paceline.research.elastic_average import ElasticAverage

MODELS = {"none": "", "A": "lost:0.333", "B": "frozen:0.1x5", "C": "restart:0.02x20"}
OPTIMISERS = ("sgd", "nesterov", "adahessian")
OVERLAP, OVERLAPS = 0.25, (0.0, 0.125, 0.25, 0.375, 0.5)
THRESHOLDS = ((0.05, 0.2), (0.1, 0.4), (0.3, 0.8), (0.5, 1.0))
METHODS = {
    "EASGD": ("sgd", ElasticAverage(weights="fixed")),
    "EAMSGD": ("nesterov", ElasticAverage(weights="fixed")),
    "EAHES": ("adahessian", ElasticAverage(weights="fixed")),
    "EAHES-O": ("adahessian", ElasticAverage(weights="fixed", overlap=OVERLAP)),
    "EAHES-OM": ("adahessian", ElasticAverage(weights="known", overlap=OVERLAP)),
    "DEAHES-O": ("adahessian", ElasticAverage(weights="dynamic", overlap=OVERLAP)),
    "missed-O": ("adahessian", ElasticAverage(weights="missed", overlap=OVERLAP)),
    "clipped-O": ("adahessian", ElasticAverage(weights="clipped", overlap=OVERLAP)),
}
"""P4's names and two more rules; -O: with data overlap, M: knows who failed, D: dynamic weights."""

Group = list[Result]
SEEDS, QUICK_STEPS, STEPS = 3, 300, 400
globals().update(smoke(SEEDS=1, QUICK_STEPS=40))


def run(images: Images, cases: Sequence[Case], *, workers: int, steps: int, progress: Progress) -> Group:
    """Train all cases; those with one tau and one kind of optimiser side by side."""
    batches: dict[tuple[int, bool], list[Case]] = defaultdict(list)
    for case in cases:
        batches[case.settings.tau, case.optimiser == "adahessian"].append(case)
    return [
        result
        for batch in batches.values()
        for result in Batch(images, batch, workers=workers, steps=steps).train(40, progress)
    ]


def mean(results: Sequence[Result], figure: str = "final", **wanted: object) -> float:
    """In points, over the seeds of the results whose case has the wanted name, failures or optimiser."""
    chosen = [r for r in results if all(getattr(r.case, key) == value for key, value in wanted.items())]
    assert chosen, wanted
    return 100 * float(np.mean([getattr(result, figure) for result in chosen]))


def compare_rules(results: Sequence[Result]) -> dict[str, object]:
    """The issue's figures, from fixed and dynamic weights under every optimiser."""
    gained, lost = 0.0, 0.0
    recovered: dict[str, float | None] = {}
    below: dict[str, dict[str, float]] = {"A": {}, "B": {}}
    for optimiser in OPTIMISERS:
        fixed = {name: mean(results, name="fixed", failures=text, optimiser=optimiser) for name, text in MODELS.items()}
        ours = {
            name: mean(results, name="dynamic", failures=text, optimiser=optimiser) for name, text in MODELS.items()
        }
        gained, lost = gained + ours["C"] - fixed["C"], lost + fixed["none"] - fixed["C"]
        recovered[optimiser] = _part(ours["C"] - fixed["C"], fixed["none"] - fixed["C"])
        for model in "AB":
            below[model][optimiser] = round(fixed[model] - ours[model], 2)
        print(
            f"{optimiser:>10}: fixed {_points(fixed)}, dynamic {_points(ours)}; recovered under C "
            f"{recovered[optimiser]}"
        )
    return {
        "recovered_c": _part(gained, lost),
        "loss_points_a": max(below["A"].values()),
        "loss_points_b": max(below["B"].values()),
        "recovered_c_each": recovered,
        "loss_points_a_each": below["A"],
        "loss_points_b_each": below["B"],
    }


def _part(gained: float, lost: float) -> float | None:
    """None where there was nothing to recover."""
    return round(gained / lost, 3) if lost > 0 else None


def _points(accuracies: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.1f}" for name, value in accuracies.items())


def rule_cases(seeds: range) -> list[Case]:
    """Fixed and dynamic weights, every optimiser and failure model; k 4, tau 1, no overlap."""
    return [
        Case(rule, ElasticAverage(weights=rule), optimiser, text, seed)
        for rule in ("fixed", "dynamic")
        for optimiser in OPTIMISERS
        for text in MODELS.values()
        for seed in seeds
    ]


def method_cases(tau: int, seeds: range) -> list[Case]:
    return [
        Case(name, replace(settings, tau=tau), optimiser, text, seed)
        for name, (optimiser, settings) in METHODS.items()
        for text in MODELS.values()
        for seed in seeds
    ]


def overlap_cases(seeds: range) -> list[Case]:
    return [
        Case(f"{name} {part:g}", replace(METHODS[name][1], overlap=part), "adahessian", MODELS[model], seed)
        for name in ("EAHES-O", "DEAHES-O")
        for part in OVERLAPS
        for model in "AC"
        for seed in seeds
    ]


READINGS = {
    "fixed": ElasticAverage(weights="fixed"),
    **{f"growth {low:g} to {high:g}": ElasticAverage(thresholds=(low, high)) for low, high in THRESHOLDS},
    **{f"fall {low:g} to {high:g}": ElasticAverage(thresholds=(low, high), reading="fall") for low, high in THRESHOLDS},
    "knows who failed": ElasticAverage(weights="known"),
}
READING_MODELS = {**MODELS, "A, 5 rounds": "lost:0.333x5", "C, stale": "restart:0.02x20:stale"}


def reading_cases(seeds: range) -> list[Case]:
    return [
        Case(name, settings, optimiser, text, seed)
        for name, settings in READINGS.items()
        for optimiser in OPTIMISERS
        for text in READING_MODELS.values()
        for seed in seeds
    ]


def reading_table(results: Sequence[Result]) -> str:
    """Both readings of P4 and several thresholds: final accuracy, the mean over the three optimisers."""
    lines = [f"| k 4, tau 1 | {' | '.join(READING_MODELS)} |", "|---" * (1 + len(READING_MODELS)) + "|"]
    for name in READINGS:
        cells = [f"{mean(results, name=name, failures=text):.1f}" for text in READING_MODELS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def method_table(results: Sequence[Result], title: str) -> str:
    """One row a method; for each failure model the final accuracy and the area under the curve."""
    lines = [f"| {title} | {' | '.join(MODELS)} |", "|---" * (1 + len(MODELS)) + "|"]
    for name in METHODS:
        cells = [
            f"{mean(results, name=name, failures=text):.1f} ({mean(results, 'area', name=name, failures=text):.1f})"
            for text in MODELS.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overlap_table(results: Sequence[Result]) -> str:
    lines = [f"| overlap r | {' | '.join(f'{part:g}' for part in OVERLAPS)} |", "|---" * (1 + len(OVERLAPS)) + "|"]
    for name in ("EAHES-O", "DEAHES-O"):
        for model in "AC":
            cells = [f"{mean(results, name=f'{name} {part:g}', failures=MODELS[model]):.1f}" for part in OVERLAPS]
            lines.append(f"| {name}, {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def quick(seeds: range, steps: int, device: torch.device) -> None:
    images, cases = digits().to(device), rule_cases(seeds)
    with _progress(len(cases) * 4 * steps) as progress:
        results = run(images, cases, workers=4, steps=steps, progress=progress)
    print(f"digits, k 4, tau 1, {steps} local steps, seeds {list(seeds)}; {MODELS}")
    settings = {"dataset": images.name, "seeds": list(seeds), "steps": steps, "failures": MODELS}
    print(json.dumps({**compare_rules(results), **settings}))


def full(seeds: range, steps: int, plots: Path, device: torch.device) -> None:
    folder = fashion_folder()
    sets = [digits(), *([fashion(folder)] if folder else [])]
    if not folder:
        print("Fashion-MNIST is not installed (Debian: dataset-fashion-mnist): digits only")
    figures: dict[str, object] = {}
    for images in sets:
        figures[images.name] = grid(images.to(device), seeds, steps, plots)
    settings = {"seeds": list(seeds), "steps": steps, "failures": MODELS}
    print(json.dumps({**figures["digits"], **settings, "datasets": list(figures)}))  # type: ignore[dict-item]


def grid(images: Images, seeds: range, steps: int, plots: Path) -> dict[str, object]:
    """P4's grid, the sweeps over overlap, readings and thresholds, and the figures of fixed against dynamic weights."""
    runs = [(method_cases(tau, seeds), workers) for workers in (4, 8) for tau in (1, 2, 4)]
    runs += [(overlap_cases(seeds), 4), (reading_cases(seeds), 4), (rule_cases(seeds), 4)]
    print(f"\n{images.name}: {steps} local steps, {seeds} seeds; final accuracy (area under the curve), %; {MODELS}")
    with _progress(sum(len(cases) * workers * steps for cases, workers in runs)) as progress:
        done = [run(images, cases, workers=workers, steps=steps, progress=progress) for cases, workers in runs]
    for (cases, workers), results in zip(runs[:6], done[:6], strict=True):
        print(f"\n{method_table(results, f'k {workers}, tau {cases[0].settings.tau}')}")
    print(f"\n{overlap_table(done[6])}\n\n{reading_table(done[7])}\n")
    for model, text in MODELS.items():
        curves = {name: _curve(done[0], name, text) for name in METHODS}
        print(draw(f"{images.name}, k 4, tau 1, model {model}", curves, plots), end="\n\n")
    return compare_rules(done[8])


def _curve(results: Sequence[Result], name: str, failures: str) -> list[float]:
    chosen = [r.curve for r in results if r.case.name == name and r.case.failures == failures]
    return [float(value) for value in np.mean(chosen, axis=0)]


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on standard error, or a line every tenth of the way where nobody watches."""
    done = 0
    if not sys.stderr.isatty():

        def note(amount: int) -> None:
            nonlocal done
            if done * 10 // total < (done + amount) * 10 // total:
                print(f"{(done + amount) / total:.0%} of {total:,} replica-steps", file=sys.stderr, flush=True)
            done += amount

        yield note
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total)
        yield lambda amount: bar.update(task, advance=amount)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fixed against dynamic weights only, under a minute")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, help=f"local steps of each worker; {QUICK_STEPS} with --quick, else {STEPS}"
    )
    parser.add_argument("--plots", type=Path, default=Path("runs/dynamic_weighting"), help="folder for plotly's files")
    parser.add_argument("--device", default="cpu", help="where all replicas train: cpu or cuda")
    options = parser.parse_args()
    options.quick = options.quick or smoking()
    torch.manual_seed(0)
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    if options.seeds < 1 or options.first_seed < 0 or steps < 40:
        parser.error("at least 1 seed, none below 0, and 40 steps")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.quick:
        quick(seeds, steps, torch.device(options.device))
    else:
        full(seeds, steps, options.plots, torch.device(options.device))


if __name__ == "__main__":
    main()
