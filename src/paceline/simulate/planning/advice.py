"""Advice for a fleet: the simplest of the fastest ways to train, which machines pay, and what failures leave.

Ways to train are compared without failures; then Paceline's goodput stands beside that of restarts from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.words.numbers import capital, number, percent
from paceline.pace import DEFAULT
from paceline.simulate import goodput_table
from paceline.simulate.goodput import compare_goodput, fleet_mtbf_s, usual_costs
from paceline.simulate.planning.choices import PERIOD_S, Choice, Player
from paceline.simulate.planning.fleet_spec import HOUR_S, FleetSpec, MachineKind, churn

AS_GOOD = 0.02
"""Part by which a simpler way may be slower and is still preferred."""
NEARLY = 0.1
"""Part by which an average with a shorter period may be slower and is still preferred."""
PAYS, WINS = 1.1, 2.0
"""Gains in samples per second from which on an average is mentioned, and from which on it is advised."""
USELESS = 0.01
"""Part of the speed below which a kind of machines is better left out."""


@dataclass(frozen=True)
class Worth:
    """The contribution of a kind of machines to the fleet."""

    kind: MachineKind
    brings: float | None
    """Part of the fleet's samples per second that would be missing without these machines.

    Below 0 they hold the others up. None: there are no others.
    """
    one_more: float
    """Gain from one more machine, as a part of the fleet's samples per second."""
    cheaper: float | None
    """Part by which a sample would be cheaper without these machines; None where no machine has a price."""


def best(choices: Sequence[Choice]) -> Choice:
    """Return the fastest choice with a round at every step, or a simpler one that is nearly as fast.

    float32 is simpler than other wire formats, and the default pace than others. The topology is the one that a run
    chooses.
    """
    exact = [one for one in choices if one.combine == "gradients" and one.found]
    fastest = max(one.samples_per_s for one in exact)
    near = [one for one in exact if one.samples_per_s >= (1 - AS_GOOD) * fastest]
    return min(near, key=lambda one: (one.comm_dtype != "float32", one.pace != DEFAULT, -one.samples_per_s))


def best_average(choices: Sequence[Choice]) -> Choice | None:
    """Return an average that is much faster than rounds at every step, if there is one.

    Among those that are nearly the fastest it has the shortest period, which differs least from rounds at every step.
    """
    averages = [one for one in choices if one.combine != "gradients" and one.found]
    fastest = max((one.samples_per_s for one in averages), default=0.0)
    if fastest < PAYS * best(choices).samples_per_s:
        return None
    near = [one for one in averages if one.samples_per_s >= (1 - NEARLY) * fastest]
    return min(near, key=lambda one: (one.period_s or 0.0, -one.samples_per_s))


def advised(choices: Sequence[Choice]) -> Choice:
    """Return the advised choice: rounds at every step, which are exact, unless an average is very much faster."""
    exact, average = best(choices), best_average(choices)
    wins = average is not None and average.samples_per_s >= WINS * exact.samples_per_s
    return average if average is not None and wins else exact


def cost_per_hour(fleet: FleetSpec) -> float:
    """Return the mean cost per hour of the machines that are present."""
    return sum(kind.count * kind.present * kind.cost_per_hour for kind in fleet.kinds)


def worth(fleet: FleetSpec, choice: Choice, *, steps: int | None = None, seed: int = 0) -> list[Worth]:
    """Return what each kind contributes under this choice; the fleet is played without it, and with one more of it."""

    def speed(changed: FleetSpec) -> float:
        player = Player(changed, steps=steps, seed=seed)
        return player.again(replace(choice, topology=player.found)).samples_per_s

    found, price = [], cost_per_hour(fleet) / choice.samples_per_s
    for kind in fleet.kinds:
        without = fleet.with_count(kind.name, 0)
        others = speed(without) if without.kinds else None
        more = fleet.with_count(kind.name, kind.count + 1)
        room = more.workers <= fleet.training.batch
        found.append(
            Worth(
                kind,
                brings=None if others is None else 1 - others / choice.samples_per_s,
                one_more=speed(more) / choice.samples_per_s - 1 if room else 0.0,
                cheaper=1 - cost_per_hour(without) / others / price if price and others else None,
            )
        )
    return found


def sentence(one: Worth) -> str:
    """Return what a kind is worth, as a sentence."""
    kind, plural = one.kind, one.kind.count > 1
    who = f"the {kind.count:,} {kind.name}" if plural else kind.name
    more = f"; one more would bring {_part(one.one_more)}"
    if one.brings is None:
        return capital(f"{who} {'are' if plural else 'is'} all there is{more}.")
    if one.brings < 0:
        held = f"{who} {'hold' if plural else 'holds'} the others up"
        return capital(f"{held}: leave {_them(plural)} out, and gain {_part(-one.brings)}.")
    gain = f"{who} {'bring' if plural else 'brings'} {_part(one.brings)}"
    if one.brings < USELESS:
        return capital(f"{gain}: leave {_them(plural)} out{_price(one)}.")
    return capital(f"{gain}{_price(one)}{more}.")


def _price(one: Worth) -> str:
    if one.cheaper is None or abs(one.cheaper) < 0.005:
        return ""
    return f", and a sample would cost {percent(abs(one.cheaper))} {'less' if one.cheaper > 0 else 'more'} without"


def _part(part: float) -> str:
    """Return a gain in words.

    >>> _part(0.0412), _part(0.123), _part(0.0001), _part(-0.02)
    ('4 %', '12 %', 'next to nothing', 'nothing')
    """
    if part <= 0:
        return "nothing"
    return "next to nothing" if part < 0.0005 else f"{100 * part:.1f} %" if part < 0.01 else percent(part)


def _them(plural: bool) -> str:
    return "them" if plural else "it"


def commands(fleet: FleetSpec, choice: Choice) -> list[str]:
    """Return the commands to type, for a roster and for a worker per machine, and the line to write for a period."""
    fewest = max(1, round(0.5 * fleet.workers))
    options = [f"--pace {choice.pace}"] if choice.pace and choice.pace != DEFAULT else []
    options += [f"--combine {choice.combine}"] if choice.combine != "gradients" else []
    options += [f"--comm-dtype {choice.comm_dtype}"] if choice.comm_dtype != "float32" else []
    if choice.period_s is None or choice.period_s == PERIOD_S:
        script_lines = []
    else:
        options.remove(f"--combine {choice.combine}")
        script_lines = [f"paceline.join(combine=paceline.Averaging(period_s={choice.period_s:g}))  # in train.py"]
    return [
        f"paceline host --host 0.0.0.0 --min {fewest} --max {fleet.workers}",
        " ".join(["paceline run --join HOST:PORT", *options, "train.py"]),
        *script_lines,
    ]


def gain_of(exact: Choice, average: Choice) -> str:
    """Return what an average would gain, and what that may cost, as a sentence."""
    gain = number(average.samples_per_s / exact.samples_per_s)
    wire = f" with comm_dtype {average.comm_dtype}" if average.comm_dtype != "float32" else ""
    return (
        f"{capital(average.name)}{wire} does {gain} times the samples per second: it pays unless it needs more than "
        f"{gain} times the samples for the same loss."
    )


@dataclass(frozen=True)
class FleetGoodput:
    """The goodput that failures leave of a fleet, as figures and in sentences."""

    figures: dict[str, Any]
    sentences: list[str]


def with_failures(fleet: FleetSpec, *, mtbf_h: float | None, replace_s: float | None) -> FleetSpec:
    """Return the fleet with a mean time between failures for machines that the file says nothing of."""
    if mtbf_h is None:
        if replace_s is not None:
            raise ValueError("--replace-s goes with --mtbf-h, a machine's mean hours between failures")
        return fleet
    if not mtbf_h > 0:
        raise ValueError(f"--mtbf-h is {mtbf_h:g}: hours, above 0")
    if replace_s is None or not (replace_s >= 0 and math.isfinite(replace_s)):
        raise ValueError("--mtbf-h needs --replace-s, the seconds until a machine that failed is replaced, at least 0")
    kinds = (
        kind if kind.reclaimed_per_hour else replace(kind, reclaimed_per_hour=1 / mtbf_h, away_s=replace_s)
        for kind in fleet.kinds
    )
    return replace(fleet, kinds=tuple(kinds))


def fleet_goodput(
    fleet: FleetSpec, chosen: Choice, *, seed: int = 0, known: Mapping[str, float] | None = None
) -> FleetGoodput | None:
    """Return the goodput of a fleet that trains as ``chosen``; None where no machine fails.

    ``known`` are costs that replace the usual ones. A newcomer's state takes as long as its slowest way, at least.
    """
    rates = fleet.column("reclaimed_per_hour") / HOUR_S
    if not rates.any():
        if known:
            raise ValueError("--costs are those of failures: give --mtbf-h, or reclaimed_per_hour in [[machines]]")
        return None
    mtbf_s = [1 / rate if rate else math.inf for rate in rates.tolist()]
    somebody_s, changes = fleet_mtbf_s(fleet.workers, mtbf_s), churn(fleet)
    step_s = fleet.training.batch / chosen.samples_per_s
    size = {"state_bytes": fleet.training.state_bytes, "fleet_mtbf_s": somebody_s}
    join_s = max(changes.coming_s, usual_costs(fleet.workers, **size).join_s)
    costs = usual_costs(fleet.workers, **size, **{"step_s": step_s, "join_s": join_s, **(known or {})})
    away_s, speeds = fleet.column("away_s").tolist(), fleet.column("speed").tolist()
    found = compare_goodput(speeds, costs, mtbf_s=mtbf_s, replace_s=away_s, seed=seed)
    sentences = goodput_table.verdict(found, costs, fleet_mtbf_s=somebody_s)
    return FleetGoodput(goodput_table.figures(found, costs), sentences)
