"""The workers' side of hunted.py: trainings that come to the very points at which a fleet once hung or broke.

Some cases use the trainings of the tests (`tests/fleet/review_cases.py`); the others are here, each the training of
chaos.py, ledger included, with what its case needs besides.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import crew
from _chaos_worker import Script
from _hunted_bugs import bug
from deadline_cases import Deadline
from elastic_cases import wait_for

import paceline
from paceline.checkpoint.file import ChecksumWriter
from paceline.gradients.fleet_sums import WireSum
from paceline.training import predict
from paceline.transport.elastic.handover import HandOver, SendingState
from paceline.transport.elastic.transport import Elastic
from paceline.transport.group import Group

LENGTH, BATCH, MICRO = 96, 24, 3
ORDER: dict[str, Any] = {
    "pace": "adaptive",
    "combine": {"name": "gradients"},
    "wire": "float32",
    "length": LENGTH,
    "batch": BATCH,
    "micro": MICRO,
    "epochs": 30,
    "sample_s": 0.003,
    "stalls": 0.0,
    "order": False,
    "calls": (),
    "autosave_s": 0.0,
    "shards": 1,
}
"""What `_chaos_worker.Script` trains, where a case does not say otherwise."""


def me() -> str:
    """Return this worker's slot. Workers are forks, which load nothing anew."""
    return os.environ["PACELINE_WORKER"]


def work(order: dict[str, Any]) -> None:
    """Run a worker's case, with a mended bug put back if there is one; SIGUSR1 writes all stacks."""
    with open(order["stacks"], "a") as stacks, bug(order["bug"]):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if ":" in order["case"]:
            crew.work(order["case"], order["value"], json.dumps(order["args"]))
        else:
            files = str(Path(order["folder"]) / f"worker.{me()}")
            script = SCRIPTS[order["case"]]({**ORDER, **order["args"], "folder": order["folder"], "files": files})
            value = script.run()
            Path(order["value"]).write_text(json.dumps({**value, "weights": value["replica"]}))
        faulthandler.unregister(signal.SIGUSR1)


class Hunted(Script):
    """The training of chaos.py, with points at which a case may wait or be struck."""

    @property
    def here(self) -> int:
        """Return the number of the step that this worker is in, as far as it has had a part in all before."""
        return self.last + 1

    def mark(self, name: str) -> Path:
        """Return a file by which this worker and the trial signal to each other."""
        return self.folder / name

    def work(self, count: int) -> None:
        super().work(count)
        self.in_work()

    def in_work(self) -> None:
        """Do what the case does within a micro-batch."""


# -- s1 ----------------------------------------------------------------------------------------------------------------


class WakesLate(Hunted):
    """The user's thread gets the processor only every 50 ms, as on cores with too much to do; deadlines of 2 ms."""

    def join(self) -> paceline.Fleet:
        return paceline.join(Deadline(**self.order["deadline"]), quiet=True)

    def steps(self, fleet: paceline.Fleet) -> Any:
        steps = super().steps(fleet)
        training = steps._loop.training
        self.slow = training.lock = SlowWake(training.lock)
        return steps

    def run(self) -> dict[str, Any]:
        return {**super().run(), "waits": self.slow.waits}


class SlowWake:
    """A lock on which the main thread, where it waits for good, looks every 50 ms alone."""

    EVERY_S = 0.05

    def __init__(self, lock: Any) -> None:
        self._lock, self.waits = lock, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._lock.__exit__(*error)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if threading.current_thread() is not threading.main_thread() or timeout is not None:
            return self._lock.wait_for(predicate, timeout)
        while not (found := predicate()):
            self.waits += 1
            self._lock.wait(timeout=0.0)  # gives the lock back, as a wait does
            self._lock.release()
            time.sleep(self.EVERY_S)
            self._lock.acquire()
        return found


# -- h5 to h8 ----------------------------------------------------------------------------------------------------------


@contextmanager
def held(where: Callable[[str], bool], arrived: Path, go: Path) -> Iterator[None]:
    """Hold the main thread, once, where it waits for the answers of a gather, its label such that ``where``.

    It goes on when there is the file ``go``, and looks first whether its generation is over: as a thread does that had
    just looked for the answers and then did not get the processor.
    """
    gather, wait_for_keys, holds = Group.gather, Group.wait_for, [False]

    def gather_late(group: Group, key: str, label: str, value: Any, **more: Any) -> list[Any]:
        if threading.current_thread() is threading.main_thread():
            holds[0] = where(label) and not arrived.exists()
        return gather(group, key, label, value, **more)

    def wait_late(group: Group, keys: list[str], *, watch: Any) -> None:
        if holds[0] and threading.current_thread() is threading.main_thread():
            holds[0] = False
            arrived.touch()
            wait_for(go)
            watch.check()
        wait_for_keys(group, keys, watch=watch)

    with mock.patch.object(Group, "gather", gather_late), mock.patch.object(Group, "wait_for", wait_late):
        yield


class FrozenInCall(Hunted):
    """Worker 1 is frozen in a call, and its proxy is the first to hear that the fleet went on without it."""

    AT = 13

    def call(self, fleet: paceline.Fleet, step: Any) -> None:
        if step.index != self.AT:
            return
        with ExitStack() as stack:
            if me() == "1":
                stack.enter_context(held(lambda label: True, self.mark("calling"), self.mark("woken")))
            getattr(self, f"_{self.order['call']}")(fleet, step.index)


class EvaluatesOutside(Hunted):
    """One worker is frozen in a step and dropped; the script's evaluation follows, while it is outside."""

    AT, PAUSE_S = 5, 0.1

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self.alone = 0
        """Evaluations that this worker made by itself."""

    def in_work(self) -> None:
        if self.here == self.AT and me() == self.order["slot"] and not self.mark("here").exists():
            self.mark("here").touch()
            time.sleep(self.PAUSE_S)

    def call(self, fleet: paceline.Fleet, step: Any) -> None:
        if step.index % 6 == 5:
            self.alone += fleet._context.outside
            self._evaluate(fleet, step.index)

    def run(self) -> dict[str, Any]:
        return {**super().run(), "alone": self.alone}


class FrozenAtPoint(Hunted):
    """Worker 1 is frozen at a step's boundary where the group is re-formed, or in the sum of fleet.predict."""

    AT, PAUSE_S = 5, 0.6

    def run(self) -> dict[str, Any]:
        re_form, sum_rows = Elastic.re_form, predict.sum_until_done

        def at_boundary(transport: Elastic) -> None:
            if not transport.outside:
                self._be_frozen()
            re_form(transport)

        def in_sum(*args: Any, **more: Any) -> Any:
            self._be_frozen()
            return sum_rows(*args, **more)

        boundary = self.order["where"] == "boundary"
        owner, name, point = (Elastic, "re_form", at_boundary) if boundary else (predict, "sum_until_done", in_sum)
        with mock.patch.object(owner, name, point):
            return super().run()

    def _be_frozen(self) -> None:
        if me() == "1" and not self.mark("here").exists():
            self.mark("here").touch()
            time.sleep(self.PAUSE_S)

    def call(self, fleet: paceline.Fleet, step: Any) -> None:
        if step.index == self.AT and self.order["where"] == "predict":
            self._predict(fleet, step.index)


class LoopMadeLate(Hunted):
    """The leader is in its loop while the others have yet to make theirs.

    They have not seen yet that the last gather before it is over, and next see that the generation is.
    """

    LAST = "loading ahead"
    """The label of that gather."""

    def steps(self, fleet: paceline.Fleet) -> Any:
        if fleet.rank == 0:
            steps = super().steps(fleet)
            self.mark("ready").touch()
            return steps
        with held(lambda label: label == self.LAST, self.mark(f"held.{me()}"), self.mark("go")):
            return super().steps(fleet)


# -- d2 ----------------------------------------------------------------------------------------------------------------


class KilledAt(Hunted):
    """One worker kills itself when it comes to a named point for the ``at``-th time."""

    def run(self) -> dict[str, Any]:
        self._came = 0
        with ExitStack() as stack:
            if me() == self.order["who"]:
                for patch in POINTS[self.order["point"]](self._die):
                    stack.enter_context(mock.patch.object(*patch))
            return super().run()

    def _die(self) -> None:
        self._came += 1
        if self._came == self.order["at"]:
            os.kill(os.getpid(), signal.SIGKILL)


Patch = tuple[Any, str, Any]


def before(owner: Any, name: str, die: Callable[[], None], *, where: Callable[..., bool] = lambda *_: True) -> Patch:
    """Return the patch that calls ``die`` before a method runs ``where`` that holds of its arguments."""
    method = getattr(owner, name)

    def struck(*args: Any, **more: Any) -> Any:
        if where(*args):
            die()
        return method(*args, **more)

    return owner, name, struck


def after(owner: Any, name: str, die: Callable[[], None], *, where: Callable[..., bool] = lambda *_: True) -> Patch:
    """Return the patch that calls ``die`` when a method has run ``where`` that held of its arguments."""
    method = getattr(owner, name)

    def struck(*args: Any, **more: Any) -> Any:
        due = where(*args)
        result = method(*args, **more)
        if due:
            die()
        return result

    return owner, name, struck


def _second_is_due(one: WireSum) -> bool:
    return not (one._forwarded or one._undivided)


def _at_the_end(transport: Elastic, label: str, value: Any) -> bool:
    return label == "the end of the run"


POINTS: dict[str, Callable[[Callable[[], None]], list[Patch]]] = {
    "before the wire's second exchange": lambda die: [before(WireSum, "forward", die, where=_second_is_due)],
    "after the wire's second exchange": lambda die: [after(WireSum, "forward", die, where=_second_is_due)],
    "writing a checkpoint": lambda die: [before(ChecksumWriter, name, die) for name in ("write", "flush")],
    "sending its state": lambda die: [before(SendingState, "put", die)],
    "state received": lambda die: [after(HandOver, "receive_state", die)],
    "taking a state over": lambda die: [before(HandOver, "take_over", die)],
    "before the last call": lambda die: [before(Elastic, "gather", die, where=_at_the_end)],
    "after the last call": lambda die: [after(Elastic, "gather", die, where=_at_the_end)],
}
"""Where a worker can be killed: the patches that call a function there."""
SCRIPTS: dict[str, type[Hunted]] = {
    "wakes late": WakesLate,
    "frozen in a call": FrozenInCall,
    "evaluates outside": EvaluatesOutside,
    "frozen at a point": FrozenAtPoint,
    "loop made late": LoopMadeLate,
    "killed": KilledAt,
}
