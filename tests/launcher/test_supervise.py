"""The supervising loop with a policy made up here: what it asks in which order, and how a run ends. No process."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launcher.supervise import Order, Supervisor

ORDER = Order(("train",), 2, {"PACELINE_PACE": "equal"}, Path("run"), devices=("cpu", "cuda:0"))


class Pool:
    """Workers that end one a turn, in the order in which they were started."""

    def __init__(self, stopped_by: int = 0) -> None:
        self.stopped_by, self.started = stopped_by, list[tuple[int, Mapping[str, str]]]()
        self.workers: list[Any] = []

    def start(self, number: int, environment: Mapping[str, str]) -> Any:
        self.started.append((number, environment))
        self.workers.append(SimpleNamespace(number=number))
        return self.workers[-1]

    def reap(self, now: float) -> list[Any]:
        return [self.workers.pop(0)] if self.workers else []

    def handle_signals(self, now: float) -> None: ...

    def listen(self) -> None: ...

    def tick(self, now: float, *, failing: bool) -> None: ...


class Toy:
    """Starts two workers, and the first once more; notes down what it is asked."""

    leave_s, foreign, loopback, failing = 1.0, ("RANK",), False, False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        for number in range(2):
            supervisor.start(number)

    def environment(self, number: int) -> Mapping[str, str]:
        return {"NUMBER": str(number), "PACELINE_PACE": "mine"}

    def ended(self, worker: Any, now: float) -> None:
        self.asked.append(f"ended {worker.number}")
        if self.asked == ["ended 0"]:
            self.supervisor.start(2)

    def act(self, now: float) -> None:
        self.asked.append("act")

    def over(self, now: float) -> bool:
        return not self.supervisor.pool.workers

    def end(self) -> tuple[str, str]:
        return "error", "it was a toy"

    def conclude(self, log: Any) -> tuple[str, int]:
        return f"the last line of {log}", 3

    def close(self) -> None: ...


def run(pool: Pool) -> tuple[int, Toy, list[Any]]:
    policy, said = Toy(), list[Any]()

    def close(end: Any) -> None:
        said.append(end)

    screen = SimpleNamespace(close=close, say=said.append)
    supervisor = Supervisor(ORDER, policy, pool, screen, wake=lambda: None)  # type: ignore[arg-type]
    return supervisor.run(), policy, said


def test_the_loop_goes_on_until_the_policy_says_that_it_is_over_and_ends_as_the_policy_concludes() -> None:
    code, policy, said = run(Pool())
    assert policy.asked == ["ended 0", "act", "ended 1", "act", "ended 2", "act"]
    assert (code, said) == (3, [("error", "it was a toy"), "the last line of None"])


def test_a_run_that_a_signal_has_stopped_ends_with_its_number_whatever_the_policy_would_conclude() -> None:
    code, _, said = run(Pool(stopped_by=15))
    assert (code, said) == (128 + 15, [("error", "it was a toy")])


def test_a_workers_variables_are_the_policys_before_the_orders_before_the_launchers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    pool = Pool()
    run(pool)
    assert [environment["NUMBER"] for _, environment in pool.started] == ["0", "1", "2"]
    assert [environment["PACELINE_DEVICE"] for _, environment in pool.started] == ["cpu", "cuda:0", "cpu"]
    for _, environment in pool.started:
        assert "RANK" not in environment
        assert (environment["OMP_NUM_THREADS"], environment["PACELINE_PACE"]) == ("3", "mine")


@pytest.mark.parametrize(("set_to", "expected"), [(None, "0"), ("5", "5")])
def test_workers_hash_names_alike_so_that_a_set_has_one_order(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, expected: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if set_to is not None:
        monkeypatch.setenv("PYTHONHASHSEED", set_to)
    pool = Pool()
    run(pool)
    assert {environment["PYTHONHASHSEED"] for _, environment in pool.started} == {expected}
