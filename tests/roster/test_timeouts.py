"""When a silent worker is given up: not for what held up the roster itself, nor while it waits for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.roster import liveness
from paceline.roster.liveness import BUSY, FROZEN, ProcessState, SilenceCheck, SilenceLimit, process_state_of
from paceline.roster.timeouts import Timeouts

LINUX = pytest.mark.skipif(not liveness.computer(), reason="the system tells nothing of processes")


class Watch:
    """A timeouts of one worker, whose process is as ``look`` says."""

    def __init__(self, state: ProcessState) -> None:
        self.frozen: list[str] = []
        self.lost = 0
        self.worker: Any = SimpleNamespace(
            last_heard=100.0,
            last_beat=100.0,
            process_state=lambda: state,
            silence_limit=SilenceLimit(),
            silence=None,
            given_up=False,
        )
        roster = SimpleNamespace(workers={7: SimpleNamespace(doing="")}, last=None, searching=False)
        rules: Any = SimpleNamespace(
            roster=roster, silent=lambda id, text: self.frozen.append(text), consider=lambda: None, waiting=""
        )
        self.timeouts = Timeouts(rules, {7: self.worker}, lose=self.lose, note=lambda kind, data: None)

    def lose(self, connection: Any) -> None:
        self.lost += 1

    def pass_time(self, first: float, last: float) -> None:
        for tenth in range(round(10 * first), round(10 * last) + 1):
            self.timeouts.forgive(tenth / 10)
            self.timeouts.tick(tenth / 10)


def test_a_worker_that_stays_silent_is_given_up_at_its_limit() -> None:
    watch = Watch(ProcessState(ticks=5))
    watch.pass_time(100.0, 101.1)
    assert not watch.frozen
    watch.pass_time(101.2, 101.4)
    assert len(watch.frozen) == 1


def test_what_held_up_the_roster_is_nobodys_silence() -> None:
    watch = Watch(ProcessState(ticks=5))
    watch.pass_time(100.0, 100.2)
    watch.pass_time(103.0, 103.7)  # it stood still in between
    assert not watch.frozen


def test_held_up_between_reading_and_looking_the_roster_reads_again_before_it_judges() -> None:
    watch = Watch(ProcessState(ticks=5))
    watch.timeouts.forgive(100.1)
    watch.timeouts.tick(103.0)
    assert not watch.frozen
    watch.worker.last_heard = 102.9  # what lay there unread
    watch.timeouts.tick(103.2)
    assert not watch.frozen


def test_a_process_that_is_gone_is_given_up_at_the_first_look() -> None:
    watch = Watch(ProcessState(gone=True))
    watch.pass_time(100.0, 100.7)
    assert watch.lost
    assert not watch.frozen


def test_one_that_waits_for_a_processor_is_waited_for_and_one_that_was_stopped_is_not() -> None:
    starved = SilenceCheck(ProcessState(ticks=5))
    assert starved.judge(3.0, limit_s=1.2, state=ProcessState(ticks=5, ready=True)) == BUSY
    assert starved.judge(6.0, limit_s=1.2, state=ProcessState(ticks=5)) == FROZEN
    assert (
        SilenceCheck(ProcessState(ticks=5)).judge(
            3.0, limit_s=1.2, state=ProcessState(ticks=5, ready=True, stopped=True)
        )
        == FROZEN
    )


@LINUX
def test_a_thread_that_runs_shows_and_a_process_that_sleeps_is_not_ready() -> None:
    assert process_state_of(os.getpid(), liveness.computer()).ready, "it looks at itself"
    script = "import time; print(flush=True); time.sleep(600)"
    sleeper = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        until = time.monotonic() + 30
        while process_state_of(sleeper.pid, liveness.computer()).ready and time.monotonic() < until:
            time.sleep(0.05)
        assert not process_state_of(sleeper.pid, liveness.computer()).ready
    finally:
        sleeper.kill()
        sleeper.communicate()


@LINUX
def test_a_process_that_vanishes_between_two_looks_is_no_error_and_a_threads_name_may_be_anything(
    tmp_path: Path,
) -> None:
    assert not liveness._ready(2**22 + 1)
    (tmp_path / "stat").write_bytes(b"7 (worker \xc3) R 1 7 7")
    assert liveness._stat(tmp_path / "stat")[0] == "R"
