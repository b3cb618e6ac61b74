"""A worker without an engine: it follows the roster as one, and its leader logs a step every 20 ms.

It ends when STEPS steps are logged or a file called ``stop`` is there; on SIGTERM it leaves. Every generation it enters
is a line on stdout.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.roster import Generation, RosterClient, RunOver

STEPS = int(os.environ.get("STEPS", "30"))
LOG = Path(os.environ.get("LOG") or os.environ["PACELINE_RUN_DIR"] + "/events.jsonl")
leaving: list[int] = []


def say(event: str, **fields: object) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps({"event": event, "t": time.time(), **fields}) + "\n")


def logged() -> int:
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    return sum('"event": "step"' in line for line in lines)


def enter(member: RosterClient, after: int, *, fresh: bool) -> Generation:
    generation = member.next_generation(after=after, fresh=fresh, orderly=True)
    print("generation", generation.number, *generation.workers, flush=True)
    return generation


def main() -> None:
    host = socket.gethostname()
    member = RosterClient(
        os.environ["PACELINE_ROSTER"],
        token=os.environ["PACELINE_TOKEN"],
        name=f"{host}/{os.environ['PACELINE_WORKER']}",
        facts={"host": host, "pid": os.getpid(), "name": f"{host}/{os.environ['PACELINE_WORKER']}"},
        on_over=lambda number: None,
    )
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    generation = enter(member, 0, fresh=True)
    if not logged() and generation.workers[0] == member.id:
        say("run", version=1, run_id="r", name="train", pace="equal", workers=[{"rank": 0}])
    while (step := logged()) < STEPS and not Path("stop").exists():
        if leaving:
            member.leave("was asked to go")  # an engine tells the others in a round, and says so; here the roster does
            sys.exit(143)
        if member.over >= generation.number or member.news or member.dropped:
            generation = enter(member, generation.number, fresh=member.dropped)
        if generation.workers[0] == member.id:
            size = len(generation.workers)
            say("step", step=step, epoch=0, generation=generation.number, workers=list(generation.workers),
                planned=[8] * size, samples=[8] * size, seconds=[0.01] * size, wall_s=0.02, loss=1.0)  # fmt: skip
        time.sleep(0.02)
    member.leave("finished")


try:
    main()
except RunOver:
    sys.exit(75)  # as the engine does: it came too late, and that is nobody's failure
