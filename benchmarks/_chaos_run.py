"""One run of chaos.py in a process of its own: its faults and its end."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from _chaos_fleet import Fleet, Life, send
from _chaos_program import Fault, Program, draw_program
from _chaos_sockets import Connection, connections_of, cut, enter_own_network
from _chaos_verdict import Verdict, dump, judge
from nursery import Nursery

BOUND_S = 60.0
"""Seconds from when the script hurries to where a run that has not ended hangs. A roster that is not informed of a
death waits for 10 s, several times in a run with bad luck."""
TICK_S = 0.02


def run_one(seed: int, folder: Path) -> Verdict:
    """Make the run of this seed; its files stay in ``folder``. The calling process must have no threads."""
    began, program = time.time(), draw_program(seed)
    verdict = Verdict(seed, str(program), note=enter_own_network())
    folder.mkdir(parents=True)
    nursery = Nursery(Path(__file__).parent, fork=True)
    nursery.load("_chaos_worker")
    fleet = Fleet(program, folder, nursery)
    try:
        _play(fleet, program, verdict)
        judge(fleet, program, verdict)
    finally:
        fleet.close()
        verdict.seconds = time.time() - began
    return verdict


def _play(fleet: Fleet, program: Program, verdict: Verdict) -> None:
    """Bring the faults about and wait for the end, or note that it does not come."""
    began, waiting = time.time(), list(program.faults)
    hurried = False
    with (fleet.folder / "faults").open("w", buffering=1) as diary:
        while fleet.tick():
            elapsed = time.time() - began
            while waiting and waiting[0].at_s <= elapsed:
                if done := strike(fleet, fault := waiting.pop(0), cuts=not verdict.note):
                    verdict.faults[fault.kind] = verdict.faults.get(fault.kind, 0) + 1
                    diary.write(f"{elapsed:6.2f} s  {fault.kind}: {done}\n")
            if elapsed > program.seconds and not hurried:
                hurried = True
                (fleet.folder / "hurry").touch()
            if elapsed > program.seconds + BOUND_S:
                verdict.hang = True
                dump(fleet.folder, [pid for _, pid in fleet.pids()], fleet.roster)
                return
            time.sleep(TICK_S)


# -- faults ------------------------------------------------------------------------------------------------------------


def strike(fleet: Fleet, fault: Fault, *, cuts: bool) -> str:
    """Do a fault to somebody; return to whom, or nothing when it may hit nobody now.

    A worker is only hit while another one surely holds the training's state: if all who hold it were lost, the
    training would be, and nobody could do anything about that.
    """
    if fault.kind == "roster":
        if fleet.roster is None:
            return ""
        fleet.close_roster(away_s=fault.seconds)
        return f"away for {fault.seconds:.2f} s"
    if fault.kind == "join":
        if (slot := fleet.free_slot()) is None or fleet.finished:
            return ""
        fleet.start(slot)
        return f"worker {slot}"
    if fault.kind.startswith("cut"):
        return _cut(fleet, fault) if cuts else ""
    life = _target(fleet, fault)
    return _signal(life, fault) if life is not None else ""


def _target(fleet: Fleet, fault: Fault) -> Life | None:
    holders = fleet.holders()
    others = [life for life in fleet.living if not life.frozen and life.back_s is None and "leave" not in life.struck]
    allowed = [life for life in others if any(holder is not life for holder in holders)]
    return _pick(allowed, fault) if allowed else None


def _signal(life: Life, fault: Fault) -> str:
    now, head = time.time(), life.processes[0].pid
    one = _pick(life.running, fault).pid
    if fault.kind == "kill":
        life.back_s = fault.seconds
        life.strike("kill", now)
        send(one, signal.SIGKILL)
    elif fault.kind == "leave":
        life.back_s = 0.5 if fault.choice < 0.5 else None
        life.strike("leave", now)
        send(head, signal.SIGTERM)
    else:
        life.frozen[one] = now + fault.seconds
        life.strike("freeze", now + fault.seconds)
        send(one, signal.SIGSTOP)
    return f"worker {life.slot}, process {one}, {fault.seconds:.2f} s"


def _cut(fleet: Fleet, fault: Fault) -> str:
    """Cut connections of one worker: all to the roster or the store, or one to another worker."""
    life = _target(fleet, fault)
    if life is None or fleet.store_port is None:
        return ""
    pid, known = life.processes[0].pid, {fleet.roster_port, fleet.store_port}
    ends = connections_of(pid)
    if fault.kind != "cut peer":
        port = fleet.roster_port if fault.kind == "cut roster" else fleet.store_port
        chosen, hit = [end for end in ends if end.remote[1] == port], [life]
    else:
        peers = [end for end in ends if not end.ports & known and life not in _far_ends(fleet, [end])]
        chosen = [_pick(peers, fault)] if peers else []
        hit = [life, *_far_ends(fleet, chosen)]
        if all(holder in hit for holder in fleet.holders()):
            return ""
    done = 0
    for end in chosen:
        with suppress(OSError):  # it has ended by itself
            cut(end)
            done += 1
    for one in hit if done else ():
        one.strike(fault.kind, time.time())
    return f"{done} of worker {', '.join(str(one.slot) for one in hit)}" if done else ""


def _far_ends(fleet: Fleet, ends: list[Connection]) -> list[Life]:
    wanted = {(end.remote, end.local) for end in ends}
    return [life for life, pid in fleet.pids() if any((one.local, one.remote) in wanted for one in connections_of(pid))]


def _pick(choices: list[Any], fault: Fault) -> Any:
    return choices[int(fault.choice * len(choices))]
