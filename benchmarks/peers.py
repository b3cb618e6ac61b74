"""The same job with each peer: Paceline, DDP, DDP with join(), torchrun, torchft, Hivemind, Lightning, Ray Train.

Four machines, emulated 1, 1, 2 and 4 times as slow, train one network on scikit-learn's digits: the same data, batch,
optimiser and padding for all (peers/job.py), one short script a peer (peers/on_*.py), and each peer with the settings
of its own docs (_peers_settings.py). Two runs each:

- *four machines, and a kill*: samples a second and the time to 90 % before the kill; then the third machine's worker
  gets SIGKILL in the middle of a computation of the fifth epoch. How many seconds are lost until the training is
  further than it was?
- *a link of 100 Mbit/s*: every machine is a network namespace behind a token bucket (needs root; else left out).

An audit of the benchmark's own reads which samples each worker really had in its updates. Lines are those of a peer's
script that the one-process script has not, leading spaces apart.

    python benchmarks/peers.py                  # 6 minutes; the first time 3 more, for the peers' own environment
    python benchmarks/peers.py --peer torchft   # this one alone
    python benchmarks/peers.py --no-link        # without root
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import _peers_notes as notes
from _peers_env import make, versions
from _peers_launch import LAUNCH, SCRIPTS, Run
from _peers_link import Place, links
from _peers_link import missing as missing_link
from _peers_notes import Note
from _peers_settings import SETTINGS
from _smoke import smoke, smoking

FACTORS, SAMPLE_MS = "1,1,2,4", 1.5
EPOCHS, LINK_EPOCHS, KILL_STEP = 6, 3, 53
KILLED = 2
"""The slot of the worker that is killed."""
SAMPLES, BATCH = 1437, 128
WANTED = 0.90
PEERS = list(LAUNCH)
NAMES = {
    "paceline": "Paceline",
    "ddp": "DDP",
    "join": "DDP, shares by hand, `join()`",
    "torchrun": "DDP, torchrun restarts",
    "torchft": "torchft",
    "hivemind": "Hivemind",
    "lightning": "Lightning DDP",
    "ray": "Ray Train",
}
START_S, STUCK_S, LINGER_S, KILL_LATEST_S = 180.0, 120.0, 1.0, 20.0
"""Limits: until the first commit; without a commit; after the last commit; and when the kill comes at the latest."""
RUN_S = {"hivemind": 45.0}
"""A peer whose steps take too long for the whole job is measured for so long."""
globals().update(
    smoke(FACTORS="1,2", SAMPLE_MS=0.5, EPOCHS=2, KILL_STEP=9, KILLED=1, PEERS=["paceline", "ddp"], STUCK_S=4.0)
)
Figures = dict[str, Any]


@dataclass
class Watched:
    """What became of a run."""

    notes: list[Note] = field(default_factory=list)
    killed_at: float | None = None
    over_at: float = 0.0
    ended: bool = False
    """All processes had ended by themselves by then; else they were stopped."""


def train(peer: str, python: str, folder: Path, *, places: list[Place], epochs: int, kill: bool) -> Watched:
    """One run to its end, which is that of its processes, of its patience or of its time."""
    settings = {"PEERS_FACTORS": FACTORS, "PEERS_SAMPLE_MS": f"{SAMPLE_MS:g}", "PEERS_EPOCHS": str(epochs)}
    with Run(python, folder, places, {**settings, "PEERS_DIGITS": str(folder.parent / "digits.npz")}) as run:
        LAUNCH[peer](run)
        _await(lambda: len(list(run.notes.glob("ready/*"))) == len(places), run, START_S)
        return watch(run, epochs=epochs, kill=kill, limit_s=RUN_S.get(peer, START_S))


def _await(what: Callable[[], bool], run: Run, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until or all(worker.poll() is not None for worker in run.workers):
            raise RuntimeError(f"the workers did not begin: {last_words(run.said())}")
        time.sleep(0.1)


def watch(run: Run, *, epochs: int, kill: bool, limit_s: float) -> Watched:
    began = moved = time.monotonic()
    seen = Watched()
    while True:
        seen.ended = all(worker.poll() is not None for worker in run.workers)
        known, seen.notes = len(seen.notes), notes.read(run.notes)
        seen.killed_at = next((note.at for note in seen.notes if note.kind == "killed"), None)
        seen.over_at = now = time.monotonic()
        if len(seen.notes) > known:
            moved = now
        patience = STUCK_S if any(note.kind == "commit" for note in seen.notes) else START_S
        patience = LINGER_S if is_whole(seen.notes, epochs=epochs) else patience
        if seen.ended or now - moved > patience or now - began > limit_s:
            return seen
        late = now - began > KILL_LATEST_S
        if kill and (late or any(note.step >= KILL_STEP for note in seen.notes)):
            (run.notes / f"kill-{KILLED}").touch()
            kill = False
        time.sleep(0.1)


def is_whole(seen: list[Note], *, epochs: int) -> bool:
    """Whether the last step of the last epoch was made."""
    return any(note.step >= epochs * ceil(SAMPLES / BATCH) - 1 for note in seen if note.kind == "commit")


def last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "error" in line] or text.splitlines()
    return lines[-1][:200] if lines else "nothing was said"


def kill_figures(seen: Watched) -> Figures:
    """Of the run with a kill: before it and after it."""
    if seen.killed_at is None:
        raise RuntimeError("the training ended before the kill")
    epoch = max((note.epoch for note in seen.notes if note.kind == "commit" and note.at < seen.killed_at), default=0)
    calm = range(1 if epoch > 1 else 0, epoch)  # in the first one torchft's workers still join
    before = notes.audit(seen.notes, samples=SAMPLES, epochs=calm)
    whole = is_whole(seen.notes, epochs=EPOCHS)
    after = notes.audit(seen.notes, samples=SAMPLES, epochs=range(epoch, EPOCHS)) if whole else None
    return {
        "samples_per_s": notes.samples_per_s(seen.notes, before=seen.killed_at),
        "seconds_to_accuracy": notes.seconds_to(WANTED, seen.notes),
        "lost_an_epoch": before[0] / len(calm) if calm else None,
        "doubled_an_epoch": before[1] / len(calm) if calm else None,
        "seconds_lost": notes.seconds_lost(seen.notes, killed_at=seen.killed_at),
        "lost_after_kill": after[0] if after else None,
        "doubled_after_kill": after[1] if after else None,
        "after_kill": outcome(seen, whole=whole),
    }


def outcome(seen: Watched, *, whole: bool) -> str:
    assert seen.killed_at is not None
    if whole:
        return "trained on to the end"
    if seen.ended:
        return f"all workers ended {seen.over_at - seen.killed_at:.0f} s later"
    waited = seen.over_at - max(note.at for note in seen.notes)
    return f"stood still for {waited:.0f} s" if waited > STUCK_S / 2 else "was still training when its time was over"


def lines_changed(script: Path) -> int:
    """Lines of code of the script that plain.py has not."""
    plain, theirs = code_of(SCRIPTS / "plain.py"), code_of(script)
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, theirs))


def code_of(script: Path) -> list[str]:
    """Its lines without leading spaces, comments, empty ones and the docstring."""
    text = script.read_text()
    first = ast.parse(text).body[0]
    lines = (line.strip() for line in text.splitlines()[first.end_lineno :])
    return [line for line in lines if line and not line.startswith("#")]


def measure(peer: str, python: str, folder: Path, *, link: bool) -> Figures:
    figures: Figures = {
        "lines": lines_changed(SCRIPTS / f"on_{peer}.py"),
        "settings": len(SETTINGS[peer]),
    }
    count = len(FACTORS.split(","))
    show(f"{peer}: four machines, and a kill ...")
    try:
        here = [Place()] * count
        seen = train(peer, python, folder / f"{peer}.kill", places=here, epochs=EPOCHS, kill=True)
        figures |= kill_figures(seen)
        if link:
            show(f"{peer}: a link of 100 Mbit/s ...")
            with links(count) as places:
                seen = train(peer, python, folder / f"{peer}.link", places=places, epochs=LINK_EPOCHS, kill=False)
            figures["link_samples_per_s"] = notes.samples_per_s(seen.notes)
    except Exception as error:  # the table has what happened, and the others go on
        figures["failed"] = f"{type(error).__name__}: {error}"
    show(f"  {json.dumps(rounded(figures))}")
    return figures


def rounded(figures: Figures) -> Figures:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}


def relative(found: dict[str, Figures]) -> None:
    """Beside every speed, how many times plain DDP's it is."""
    for name in ("samples_per_s", "link_samples_per_s"):
        base = found.get("ddp", {}).get(name)
        for figures in found.values():
            if base and figures.get(name):
                figures[f"{name}_over_ddp"] = figures[name] / base


COLUMNS = (
    "samples/s",
    "over DDP",
    "seconds to 90 %",
    "lost / doubled an epoch",
    "seconds lost a kill",
    "lost / doubled after it",
    "samples/s at 100 Mbit/s",
    "over DDP",
    "lines",
    "settings",
)


def table(found: dict[str, Figures]) -> str:
    """The figures as docs/evidence.md shows them."""
    head = f"| | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}"
    return "\n".join([head, *(f"| {NAMES[peer]} | {' | '.join(row(figures))} |" for peer, figures in found.items())])


def row(figures: Figures) -> list[str]:
    def said(name: str, digits: int) -> str:
        value = figures.get(name)
        return "-" if value is None else f"{value:,.{digits}f}"

    lost = said("seconds_lost", 2) if figures.get("seconds_lost") is not None else figures.get("after_kill", "-")
    return [
        said("samples_per_s", 0),
        said("samples_per_s_over_ddp", 2),
        said("seconds_to_accuracy", 1),
        f"{said('lost_an_epoch', 0)} / {said('doubled_an_epoch', 0)}",
        lost,
        f"{said('lost_after_kill', 0)} / {said('doubled_after_kill', 0)}",
        said("link_samples_per_s", 0),
        said("link_samples_per_s_over_ddp", 2),
        said("lines", 0),
        said("settings", 0),
    ]


def save_digits(path: Path) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(path, data=digits.data, target=digits.target)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=list(LAUNCH), help="only this one; may be repeated")
    parser.add_argument("--no-link", action="store_true", help="without the runs on a slow link")
    parser.add_argument("--keep", type=Path, help="keep the notes and logs in this new folder")
    parser.add_argument("--env", type=Path, default=Path(__file__).parent / ".peers", help="the peers' environment")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all processes end as well
    python, missing = (sys.executable, {}) if smoking() else make(options.env.absolute())
    no_link = "left out" if options.no_link or smoking() else missing_link()
    if no_link:
        show(f"no slow link: {no_link}")
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep.absolute() if options.keep else Path(name)
        folder.mkdir(exist_ok=True)
        save_digits(folder / "digits.npz")
        for peer in options.peer or PEERS:
            found[peer] = {"failed": missing[peer]} if peer in missing else {}
            found[peer] |= {} if found[peer] else measure(peer, python, folder, link=not no_link)
    relative(found)
    print(table(found))
    peers = {peer: rounded(figures) for peer, figures in found.items()}
    print(json.dumps({"peers": peers, "versions": versions(python), "no_link": no_link}))


if __name__ == "__main__":
    main()
