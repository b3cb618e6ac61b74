"""What to do with a fleet: the way to train that is simplest among the fastest, and which machines are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.observe.words.numbers import capital, number, percent
from paceline.pace import DEFAULT
from paceline.simulate.planning.choices import PERIOD_S, Choice, Player
from paceline.simulate.planning.fleet_spec import FleetSpec, MachineKind

AS_GOOD = 0.02
"""A simpler way that is slower by no more than this is taken instead."""
NEARLY = 0.1
"""The same among averages."""
PAYS, WINS = 1.1, 2.0
"""An average is mentioned from so many times the samples a second on, and advised from so many on."""
USELESS = 0.01
"""Who brings less than this part of the speed is better left out."""


@dataclass(frozen=True)
class Worth:
    """What a kind of machines brings."""

    kind: MachineKind
    brings: float | None
    """Part of the fleet's samples a second that would be missing without them; below 0: they hold the others up. None:
    there are no others."""
    one_more: float
    """What one more of them would add, as a part of the fleet's samples a second."""
    cheaper: float | None
    """Part by which a sample would be cheaper without them; None where nothing costs anything."""


def best(choices: Sequence[Choice]) -> Choice:
    """The fastest with a round at every step, or a simpler one that is nearly as fast: float32 before other wires, the
    default pace before others. The topology is that which a run finds."""
    exact = [one for one in choices if one.combine == "gradients" and one.found]
    fastest = max(one.samples_per_s for one in exact)
    near = [one for one in exact if one.samples_per_s >= (1 - AS_GOOD) * fastest]
    return min(near, key=lambda one: (one.wire != "float32", one.pace != DEFAULT, -one.samples_per_s))


def best_average(choices: Sequence[Choice]) -> Choice | None:
    """An average where it is much faster than rounds at every step: of the nearly fastest, the one with the shortest
    period, which parts least from them."""
    averages = [one for one in choices if one.combine != "gradients" and one.found]
    fastest = max((one.samples_per_s for one in averages), default=0.0)
    if fastest < PAYS * best(choices).samples_per_s:
        return None
    near = [one for one in averages if one.samples_per_s >= (1 - NEARLY) * fastest]
    return min(near, key=lambda one: (one.period_s or 0.0, -one.samples_per_s))


def advised(choices: Sequence[Choice]) -> Choice:
    """What to take: rounds at every step, which are exact, unless an average is very much faster."""
    exact, average = best(choices), best_average(choices)
    wins = average is not None and average.samples_per_s >= WINS * exact.samples_per_s
    return average if average is not None and wins else exact


def cost_per_hour(fleet: FleetSpec) -> float:
    """Of all machines that are there, on average."""
    return sum(kind.count * kind.present * kind.cost_per_hour for kind in fleet.kinds)


def worth(fleet: FleetSpec, choice: Choice, *, steps: int | None = None, seed: int = 0) -> list[Worth]:
    """What each kind brings under this choice: the fleet is played without it, and with one more of it."""

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
    """What a kind is worth, as a sentence."""
    kind, plural = one.kind, one.kind.count > 1
    who = f"the {kind.count:,} {kind.name}" if plural else kind.name
    more = f"; one more would bring {_part(one.one_more)}"
    if one.brings is None:
        return capital(f"{who} {'are' if plural else 'is'} all there is{more}.")
    if one.brings < 0:
        held = f"{who} {'hold' if plural else 'holds'} the others up"
        return capital(f"{held}: leave {_them(plural)} out, and gain {_part(-one.brings)}.")
    said = f"{who} {'bring' if plural else 'brings'} {_part(one.brings)}"
    if one.brings < USELESS:
        return capital(f"{said}: leave {_them(plural)} out{_price(one)}.")
    return capital(f"{said}{_price(one)}{more}.")


def _price(one: Worth) -> str:
    if one.cheaper is None or abs(one.cheaper) < 0.005:
        return ""
    return f", and a sample would cost {percent(abs(one.cheaper))} {'less' if one.cheaper > 0 else 'more'} without"


def _part(part: float) -> str:
    """
    >>> _part(0.0412), _part(0.123), _part(0.0001), _part(-0.02)
    ('4 %', '12 %', 'next to nothing', 'nothing')
    """
    if part <= 0:
        return "nothing"
    return "next to nothing" if part < 0.0005 else f"{100 * part:.1f} %" if part < 0.01 else percent(part)


def _them(plural: bool) -> str:
    return "them" if plural else "it"


def commands(fleet: FleetSpec, choice: Choice) -> list[str]:
    """What to type: a roster, and on every machine a worker that joins it; and what to write, for a period."""
    fewest = max(1, round(0.5 * fleet.workers))
    options = [f"--pace {choice.pace}"] if choice.pace and choice.pace != DEFAULT else []
    options += [f"--combine {choice.combine}"] if choice.combine != "gradients" else []
    options += [f"--wire {choice.wire}"] if choice.wire != "float32" else []
    if choice.period_s is None or choice.period_s == PERIOD_S:
        said = []
    else:
        options.remove(f"--combine {choice.combine}")
        said = [f"paceline.join(combine=paceline.Averaging(period_s={choice.period_s:g}))  # in train.py"]
    return [
        f"paceline host --host 0.0.0.0 --min {fewest} --max {fleet.workers}",
        " ".join(["paceline run --join HOST:PORT", *options, "train.py"]),
        *said,
    ]


def gain_of(exact: Choice, average: Choice) -> str:
    """What an average would gain, and what that may cost."""
    gain = number(average.samples_per_s / exact.samples_per_s)
    wire = f" with wire {average.wire}" if average.wire != "float32" else ""
    return (
        f"{capital(average.name)}{wire} does {gain} times the samples a second: it pays unless it needs more than "
        f"{gain} times the samples for the same loss."
    )
