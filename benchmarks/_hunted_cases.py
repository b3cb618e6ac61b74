"""What hunted.py plays: each program that once hung or broke a fleet, in all its variants, and which bug it shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from _hunted_fleet import Jitter, Stage
from _hunted_worker import LENGTH as OWN_LENGTH
from elastic_cases import LENGTH

TRAINING = "review_cases.py:train"
EPOCHS = 4
PACES: dict[str, Any] = {
    "adaptive": "adaptive",
    "joint": "joint",
    "deadline": {"deadline_s": 0.15, "over": 1.3},
    "floor": {"deadline_s": 0.03, "over": 1.0, "least_count": 0.9},
    "count": {"deadline_s": None, "wait_for": 2, "over": 1.3},
}
EVALUATED = 13
"""The step after which trainings with ``evaluate: 14`` evaluate first."""
Variant = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One program that was hunted."""

    name: str
    shows: str
    """What it once showed."""
    play: Callable[[Stage, Variant], None]
    """Plays one of the ``variants``, and raises what is wrong."""
    variants: Mapping[str, Variant]
    """By their names; each names the ``bug`` that it shows, or none."""
    cuts: bool = False
    """Whether it cuts connections, which needs a network of its own."""


# -- a lap's offer, and calls in a group that is not settled -----------------------------------------------------------


def lost_wake_up(stage: Stage, variant: Variant) -> None:
    """A lap grants work and ends before the loop has woken."""
    pace = {"deadline_s": 0.002, "over": 1.3, **variant["pace"]}
    order = {"deadline": pace, "length": 48, "batch": 12, "epochs": 3, "sample_s": 0.0}
    with stage.fleet("wakes late", 2, order, fixed=True) as fleet:
        outcomes = fleet.finish()
        waits = [one.value["waits"] for one in outcomes.values() if one.value]
        fleet.judge(length=48, epochs=3, happened=any(waits))


def stress(stage: Stage, variant: Variant) -> None:
    """Deadlines, a late worker, processes that stop for moments, and a kill in or near an evaluation."""
    dice = stage.dice
    pace, order, jitters = dice.choice(["deadline", "deadline", "floor", "count"]), dice.random() < 0.4, dice.random()
    args = {"pace": PACES[pace], "sleeps": ["1", 12], "evaluate": 14, "order": order, "epochs": EPOCHS}
    with stage.fleet(TRAINING, 3, args) as fleet:
        fleet.until_file("asleep")
        with Jitter(fleet, dice, often=jitters < 0.7):
            if dice.random() < 0.5:
                fleet.until_file(f"evaluating.2.{EVALUATED}")
            else:
                time.sleep(dice.random() * 0.6)
            time.sleep(dice.choice([0, 0, 0.002, 0.01, 0.05]))
            if fleet.workers[2].poll() is None:
                fleet.kill(2)
            if dice.random() < 0.5:
                time.sleep(dice.choice([0.001, 0.01, 0.1, 1.5]))
            (fleet.folder / "wake").touch()
            fleet.finish()
        fleet.judge(length=LENGTH, epochs=EPOCHS, killed={2})


# -- a round that was handed over --------------------------------------------------------------------------------------


def handed_over(stage: Stage, variant: Variant) -> None:
    """Worker 0 dies in a round whose result worker 1 has and worker 2 has not."""
    args = {"pace": PACES[variant["pace"]], "half": variant["half"], "order": variant["order"], "epochs": EPOCHS}
    with stage.fleet(TRAINING, 3, args) as fleet:
        fleet.finish()
        fleet.judge(length=LENGTH, epochs=EPOCHS, killed={0})


def half(pace: str, at: int, *, order: bool, bug: str = "") -> tuple[str, Variant]:
    """Return a variant of `handed_over`; an epoch has ten steps, so 9 and 19 are the last ones of theirs."""
    return f"{pace}-{at}", {"pace": pace, "half": at, "order": order, "bug": bug}


# -- the store ---------------------------------------------------------------------------------------------------------


def cut_store(stage: Stage, variant: Variant) -> None:
    """A worker's connection to the store is cut while all is well; then a newcomer wants to enter."""
    args = {"epochs": 12, "pause_s": 0.05, "pace": PACES[variant["pace"]]}
    with stage.fleet(TRAINING, 3, args) as fleet:
        fleet.until_step(8)
        cuts = fleet.cut_store(1)
        fleet.until_step(fleet.records()[-1]["step"] + 5)
        fleet.start(3)
        fleet.until_members("a step with the newcomer", lambda workers: 3 in workers)
        (fleet.folder / "hurry").touch()
        fleet.finish()
        fleet.judge(length=LENGTH, epochs=12, happened=cuts > 0)


# -- before the first step ---------------------------------------------------------------------------------------------


def killed_at_the_start(stage: Stage, variant: Variant) -> None:
    """A worker dies between join and its first steps."""
    with stage.fleet(TRAINING, 3, {"pace": PACES[variant["pace"]], "epochs": 1, "pause_s": 0.0}) as fleet:
        fleet.until(lambda: any("reaches the others" in fleet.said(slot) for slot in range(3)), "the first group")
        time.sleep(stage.dice.uniform(0.0, 0.15))
        fleet.kill(2)
        fleet.finish()
        fleet.judge(length=LENGTH, epochs=1, killed={2})


def killed_before_all_loops(stage: Stage, variant: Variant) -> None:
    """A worker dies while one script is in its loop and another has yet to make its own."""
    with stage.fleet("loop made late", 3, {"epochs": 2, "sample_s": 0.0}) as fleet:
        fleet.until_file("ready")
        held = lambda: [slot for slot in range(3) if (fleet.folder / f"held.{slot}").exists()]  # noqa: E731
        fleet.until(lambda: len(held()) == 2, "two workers before their loops")
        fleet.kill(slot := held()[1])
        time.sleep(1.0)  # the others have heard of it
        (fleet.folder / "go").touch()
        fleet.finish()
        fleet.judge(length=OWN_LENGTH, epochs=2, killed={slot})


# -- frozen ------------------------------------------------------------------------------------------------------------


def frozen_in_evaluation(stage: Stage, variant: Variant) -> None:
    """Worker 1 is frozen inside an evaluation until the fleet has gone on without it."""
    args = {"pace": PACES[variant["pace"]], "epochs": 8, "evaluate": 14, "slow_score": 0.05}
    with stage.fleet(TRAINING, 3, args) as fleet:
        fleet.until_file(f"evaluating.1.{EVALUATED}")
        fleet.freeze_and_wake(1, fleet.goes_on_without(1), pause_s=stage.dice.uniform(0.0, 0.3))
        (fleet.folder / "hurry").touch()
        fleet.finish()
        fleet.judge(length=LENGTH, epochs=8, dropped={1})


def frozen_in_call(stage: Stage, variant: Variant) -> None:
    """Worker 1 is frozen while it waits for the others in another call; its proxy hears of it first."""
    order = {"pace": variant["pace"], "call": variant["call"], "epochs": 40}
    with stage.fleet("frozen in a call", 3, order) as fleet:
        fleet.until_file("calling")
        fleet.freeze_and_wake(1, fleet.goes_on_without(1))
        time.sleep(0.5 + stage.dice.uniform(0.0, 0.3))
        for name in ("woken", "hurry"):
            (fleet.folder / name).touch()
        fleet.finish()
        fleet.judge(length=OWN_LENGTH, epochs=40, dropped={1})


def dropped_then_evaluates(stage: Stage, variant: Variant) -> None:
    """A worker is frozen in a step and dropped; then its script evaluates, while it is outside."""
    slot = variant["slot"]
    with stage.fleet("evaluates outside", 3, {"slot": str(slot)}) as fleet:
        fleet.until_file("here")
        fleet.freeze_and_wake(slot, fleet.goes_on_without(slot))
        outcomes = fleet.finish()
        alone = outcomes[slot].value["alone"] if outcomes[slot].value else 0
        fleet.judge(length=OWN_LENGTH, epochs=30, dropped={slot}, happened=alone > 0)


def frozen_at_point(stage: Stage, variant: Variant) -> None:
    """Worker 1 is frozen where the group is re-formed at a step's boundary, or in the sum of fleet.predict."""
    with stage.fleet("frozen at a point", 3, {"where": variant["where"], "epochs": 40}) as fleet:
        if variant["where"] == "boundary":
            fleet.until_step(6)
            fleet.start(3)
        fleet.until_file("here")
        fleet.freeze_and_wake(1, fleet.goes_on_without(1))
        fleet.until(lambda: fleet.is_back(1), "worker 1's return or end")
        (fleet.folder / "hurry").touch()
        fleet.finish()
        fleet.judge(length=OWN_LENGTH, epochs=40, dropped={1})


# -- killed at named points --------------------------------------------------------------------------------------------


def killed_at_point(stage: Stage, variant: Variant) -> None:
    """A worker dies at a named point: a hand-over, the wire's exchanges, a checkpoint, the last call."""
    order = {"epochs": 6, "sample_s": 0.0007, "calls": CALLS, **{k: v for k, v in variant.items() if k != "bug"}}
    with stage.fleet("killed", 3, order) as fleet:
        if variant.get("joins"):
            fleet.until_step(3)
            fleet.start(3)
        fleet.finish(reports=True)
        who, epochs = {int(variant["who"])}, None if "combine" in variant else order["epochs"]
        whole = variant["point"] != "after the last call"  # the leader would write it, and nobody waits for that
        fleet.judge(length=OWN_LENGTH, epochs=epochs, killed=who, dropped={*fleet.workers} - who, whole=whole)


CALLS = [["evaluate", 13, 5], ["save", 17, 9], ["any", 19, 11], ["predict", 23, 14]]


def points() -> dict[str, Variant]:
    """Return the points of `killed_at_point`, each under two paces, and two of averages."""
    between, first = "after the wire's second exchange", "before the wire's second exchange"
    bf16 = {"wire": "bf16"}
    places: list[tuple[str, Variant]] = [
        ("exchange-0", {"point": between, "at": 12, "who": "0", **bf16}),
        ("exchange-2", {"point": between, "at": 13, "who": "2", **bf16}),
        ("exchange-1", {"point": first, "at": 9, "who": "1", **bf16}),
        ("save", {"point": "writing a checkpoint", "at": 1, "who": "0"}),
        ("autosave", {"point": "writing a checkpoint", "at": 3, "who": "0", "autosave_s": 0.3}),
        ("giver", {"point": "sending its state", "at": 1, "who": "0", "joins": True}),
        ("taker", {"point": "state received", "at": 1, "who": "3", "joins": True}),
        ("taken", {"point": "taking a state over", "at": 1, "who": "3", "joins": True}),
        ("end-0", {"point": "before the last call", "at": 1, "who": "0"}),
        ("end-2", {"point": "before the last call", "at": 1, "who": "2"}),
        ("ended-0", {"point": "after the last call", "at": 1, "who": "0"}),
    ]
    found = {f"{pace}-{name}": {"pace": pace, **place} for pace in ("adaptive", "joint") for name, place in places}
    averages = {"pace": "adaptive", "combine": {"name": "average", "period_s": 0.05}, "point": between}
    found["average-int8"] = {**averages, "wire": "int8", "at": 3, "who": "1"}
    found["average-bf16"] = {**averages, "wire": "bf16", "at": 2, "who": "0"}
    return {name: {**place, "bug": "forgets_claims_of_the_dead"} for name, place in found.items()}


STRESS = "stress2"
"""The case that is drawn, and can be played for a given time."""
CASES = (
    Case(
        "s1",
        "a lap's grant was lost: all loops late, for ever",
        lost_wake_up,
        {
            "plain": {"pace": {}, "bug": "lost_wake_up"},
            "floor": {"pace": {"least_count": 0.9}, "bug": "lost_wake_up"},
        },
    ),
    Case(
        STRESS,
        "a call was made in a group that was formed and not settled",
        stress,
        {f"drawn-{number}": {"bug": "unsettled_group"} for number in range(4)},
    ),
    Case(
        "h1",
        "the proxy waited for itself; sums were made for the old members",
        handed_over,
        dict(
            [
                half("deadline", 9, order=True, bug="waits_for_itself"),
                half("deadline", 19, order=True, bug="waits_for_itself"),
                half("deadline", 8, order=True, bug="sums_of_the_old_size"),
                half("deadline", 18, order=True, bug="sums_of_the_old_size"),
            ]
        ),
    ),
    Case(
        "h2",
        "the same with a floor, or a lap, after the round",
        handed_over,
        dict(
            half(pace, at, order=False, bug="sums_of_the_old_size") for pace in ("deadline", "floor") for at in (8, 18)
        )
        | dict(half("count", at, order=False) for at in (8, 9)),
    ),
    Case(
        "h3",
        "the fleet waited for ever over a broken connection",
        cut_store,
        {pace: {"pace": pace, "bug": "keeps_a_broken_store"} for pace in ("adaptive", "joint", "deadline")},
        cuts=True,
    ),
    Case(
        "h4",
        "the others read facts of a loop that was not there",
        killed_at_the_start,
        {pace: {"pace": pace, "bug": "asks_loops_that_are_not_there"} for pace in ("adaptive", "joint")},
    ),
    Case(
        "h5",
        "the fleet hung when the proxy learnt first that its worker was dropped",
        frozen_in_evaluation,
        {pace: {"pace": pace, "bug": "re_enters_in_mid_call"} for pace in ("deadline", "joint")}
        | {"adaptive": {"pace": "adaptive", "bug": ""}},
    ),
    Case(
        "h5-calls",
        "the same in predict, save and any",
        frozen_in_call,
        {
            call: {"pace": "deadline", "call": call, "bug": "re_enters_in_mid_call"}
            for call in ("predict", "save", "any")
        },
    ),
    Case(
        "h6",
        "a worker outside was dealt a part of an evaluation: KeyError, ValueError",
        dropped_then_evaluates,
        {f"slot-{slot}": {"slot": slot, "bug": "deals_to_one_outside"} for slot in range(3)},
    ),
    Case(
        "h7",
        "a dropped worker ended with an error and did not enter anew",
        frozen_at_point,
        {
            "boundary": {"where": "boundary", "bug": "dropped_at_a_boundary"},
            "predict": {"where": "predict", "bug": "dropped_in_a_call"},
        },
    ),
    Case(
        "h8",
        "as h4, while one script is in its loop and another before it",
        killed_before_all_loops,
        {"ready": {"bug": "asks_loops_that_are_not_there"}},
    ),
    Case("d2", "nothing: all were sound", killed_at_point, points()),
)
