"""When a deadline pays."""

import json

from paceline.pace.gain import Gain


def judged(steps: list[tuple[float, float]], *, deadline: bool = False, least: float = 0.02) -> Gain:
    gain = Gain(least=least)
    for waited_s, together_s in steps:
        gain.observe(waited_s, together_s, 100, deadline=deadline)
    return gain


def test_a_calm_fleet_has_nothing_to_gain() -> None:
    gain = judged([(1.01, 1.0)] * 50)
    assert not gain.on
    assert abs(gain.value - 0.01) < 1e-9


def test_one_stall_among_a_hundred_calm_steps_turns_it_on_at_once() -> None:
    assert judged([(1.0, 1.0)] * 100 + [(50.0, 1.3)]).on


def test_it_goes_off_again_only_when_nothing_is_gained() -> None:
    gain = judged([(1.0, 1.0)] * 20 + [(50.0, 1.3)])
    for _ in range(300):
        gain.observe(1.01, 1.0, 100, deadline=True)
    assert gain.on  # between nothing and the least gain it stays as it is
    for _ in range(300):
        gain.observe(0.99, 1.0, 100, deadline=True)
    assert not gain.on


def test_nobody_is_waited_for_while_somebody_is_stuck() -> None:
    gain = judged([(50.0, 1.3)])
    for _ in range(300):
        gain.observe(0.9, 1.0, 100, deadline=True, may_end=False)
    assert gain.on
    gain.observe(0.9, 1.0, 100, deadline=True)
    assert not gain.on


def test_what_a_deadline_itself_costs_counts_against_it() -> None:
    gain = judged([(1.1, 1.0)] * 20)
    assert gain.on
    for _ in range(100):
        gain.observe(1.1, 1.0, 100, deadline=True, overhead_s=0.2)
    assert not gain.on
    for _ in range(100):  # and is not forgotten
        gain.observe(1.1, 1.0, 100, deadline=False)
    assert not gain.on


def test_the_state_survives_json() -> None:
    one, other = judged([(2.0, 1.0), (1.5, 1.2)]), Gain(least=0.02)
    one.observe(1.0, 1.0, 10, deadline=True, overhead_s=0.3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for gain in (one, other):
        gain.observe(3.0, 1.0, 10, deadline=False, overhead_s=0.1)
    assert (one.value, one.on) == (other.value, other.on)
