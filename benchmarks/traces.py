"""Shares and deadline together against recorded traces: how near to the sum of the workers' speeds?

Every CSV in DIR that is a trace of step times (its first column the step, then each worker's seconds for an equal
share) and every seeded scenario is played with the pacer `joint`, which sees only the past: with the last micro-batch
cut to fit (5 % noise of the micro-batches within a step), and with whole micro-batches, 16 to an equal share, where one
that is not finished in time delays its worker until it ends. Beside it: naive, the clairvoyant cut-off of P3 and the
limit, the sum of the workers' own speeds. The first steps (10, or a quarter of a short trace) are played but not
scored: nobody has seen anything yet.

    python benchmarks/traces.py                  # the seeded scenarios
    python benchmarks/traces.py --traces DIR     # and the traces in DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _smoke import smoke

from paceline.machines.trace import read_trace
from paceline.pace import Joint
from paceline.pace.forecast import clairvoyant_counts
from paceline.simulate import SCENARIOS, compare_stuck, deadline_play, make, matrices, play

SIZES = (16, 158)
STEPS = 300
WARM_UP = 10
SEEDS = (0,)
globals().update(smoke(SIZES=(4,), STEPS=24, WARM_UP=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of recorded traces (*.csv)")
    parser.add_argument("--forecast", default="smoothed", help="joint's forecast: last, smoothed, window")
    arguments = parser.parse_args()
    matrices = [*_recorded(arguments.traces), *_seeded()]
    rows = []
    for number, (name, own) in enumerate(matrices, start=1):
        _say(f"{number} of {len(matrices)}: {name}")
        rows.append(measure(name, own, arguments.forecast))
    _say("")
    _table(rows)
    print(json.dumps({**worst(rows), **stuck_inside(), "traces": {row.pop("name"): row for row in rows}}))


def measure(name: str, own: np.ndarray, forecast: str) -> dict[str, Any]:
    """Joint's figures on one matrix of seconds, steps x workers."""
    warm_up = min(WARM_UP, len(own) // 4)
    whole, cut = (deadline_play.play(own, Joint(forecast), cut_to_fit=fits).after(warm_up) for fits in (False, True))
    limit = play.limit(own).after(warm_up).throughput
    naive = play.counts("naive", own, own.shape[1]).after(warm_up).throughput
    oracle = play.counts("oracle", own, clairvoyant_counts(np.sort(own, axis=1))).after(warm_up).throughput
    figures = {
        "joint_over_limit": cut.throughput / limit,
        "joint_whole_over_limit": whole.throughput / limit,
        "joint_over_oracle": cut.throughput / oracle,
        "joint_over_naive": cut.throughput / naive,
        "limit_over_naive": limit / naive,
        "oracle_over_naive": oracle / naive,
        "count_cv": cut.count_cv,
        "count_cv_whole": whole.count_cv,
    }
    return {"name": name, "steps": len(own), "workers": own.shape[1], **{k: round(v, 4) for k, v in figures.items()}}


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    calm = [row["joint_over_naive"] for row in rows if row["name"].startswith("calm")]
    return {
        "worst_joint_over_limit": min(row["joint_over_limit"] for row in rows),
        "worst_joint_whole_over_limit": min(row["joint_whole_over_limit"] for row in rows),
        "worst_joint_over_oracle": min(row["joint_over_oracle"] for row in rows),
        "worst_count_cv": max(max(row["count_cv"], row["count_cv_whole"]) for row in rows),
        "calm_joint_over_naive": min(calm),
    }


def stuck_inside() -> dict[str, float]:
    """The scenario of `benchmarks/stalls.py` without processes: 1 % of micro-batches take fifty times as long."""
    outcomes = []
    for seed in range(5):
        own = matrices.stuck_machines(steps=STEPS, workers=matrices.STUCK_WORKERS, seed=seed)
        outcomes.append({outcome.name: outcome for outcome in compare_stuck(own, warm_up=WARM_UP, seed=seed)})

    def over(one: str, other: str) -> float:
        return round(float(np.mean([told[one].throughput / told[other].throughput for told in outcomes])), 4)

    return {"stuck_joint_over_limit": over("joint", "limit"), "stuck_joint_over_adaptive": over("joint", "adaptive")}


def _recorded(folder: Path | None) -> Iterator[tuple[str, np.ndarray]]:
    if folder is None:
        print("seeded scenarios only; --traces DIR adds recorded traces\n")
        return
    files = sorted(folder.glob("*.csv"))
    if not files:
        sys.exit(f"no traces: {folder} has no *.csv")
    for file in files:
        try:
            own = read_trace(file).seconds
        except ValueError as error:
            print(f"skipped {file.name}, which is not a trace of step times ({error})")
            continue
        if len(own) < 2:
            print(f"skipped {file.name}: one step leaves nothing to score")
            continue
        yield file.stem, own


def _seeded() -> Iterator[tuple[str, np.ndarray]]:
    for name in SCENARIOS:
        for workers in SIZES:
            for seed in SEEDS:
                yield f"{name}, {workers} workers, seed {seed}", make(name, steps=STEPS, workers=workers, seed=seed)


def _table(rows: list[dict[str, Any]]) -> None:
    columns = ("joint_over_limit", "joint_whole_over_limit", "joint_over_oracle", "joint_over_naive", "count_cv")
    titles = ("of limit", "whole", "of oracle", "of naive", "count cv")
    print(f"{'trace':<36}" + "".join(f"{title:>11}" for title in titles))
    for row in rows:
        print(f"{row['name']:<36}" + "".join(f"{row[column]:>11.3f}" for column in columns))


def _say(text: str) -> None:
    """Progress on standard error, one line that is written over."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
