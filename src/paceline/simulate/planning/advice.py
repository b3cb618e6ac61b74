"""Advice for a fleet: the way to train that is simplest among the fastest, and which machines are worth their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.observe.words.numbers import capital, number, percent
from paceline.pace import DEFAULT
from paceline.simulate.planning.choices import PERIOD_S, Choice, Player
from paceline.simulate.planning.fleet_spec import FleetSpec, MachineKind

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
    """What a kind of machines contributes to the fleet."""

    kind: MachineKind
    brings: float | None
    """Part of the fleet's samples per second that would be missing without these machines.

    Below 0 they hold the others up. None: there are no others.
    """
    one_more: float
    """What one more machine would add, as a part of the fleet's samples per second."""
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
