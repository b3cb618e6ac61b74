"""``paceline demo``: one training on unlike machines, first in plain torch DDP, then with Paceline, and what it gained.

Both are started by the launcher of ``paceline run``, on the same emulated machines, with the same network, data and
batches. The limit is known in advance, since the machines are emulated: with f_i times s seconds per sample on machine
i, the fleet can do at most ``sum_i 1 / (f_i * s)`` samples per second, however the work is dealt.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.examples import examples_folder
from paceline.cli.terminal import leave_with, refuse
from paceline.launcher.screen import short_path
from paceline.machines import Machine, parse_fleet
from paceline.observe import new_run_dir, read_log
from paceline.observe.words.numbers import duration, number, percent_cell, times

BATCH = 128
"""Samples per step, rounded to a multiple of the number of machines: DDP can only split equally."""
DIGITS = 1437
"""Training samples of the digits, for the forecast of how long each part takes."""

Emulate = Annotated[
    str, typer.Option(metavar="LIST", help="The machines: how many times SLOWER each is than the reference.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the digits.")]
SampleMs = Annotated[float, typer.Option(help="The reference machine's milliseconds per sample.")]
OutputDir = Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")]


def demo(
    emulate: Emulate = "1,1,2,4", epochs: Epochs = 6, sample_ms: SampleMs = 3.0, output_dir: OutputDir = Path("runs")
) -> None:
    """Train on unlike machines, emulated here: first plain torch DDP, then Paceline, then both in one table."""
    try:
        fleet = parse_fleet(emulate, sample_ms=sample_ms)
        show = Show(examples(), fleet, emulate, sample_ms, epochs, new_run_dir(output_dir, "demo").resolve())
    except ValueError as error:
        refuse(f"demo: {error}")
    leave_with(show.run())


def examples() -> Path:
    """Return the folder of the examples; raise ValueError if what they need is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("the digits come with scikit-learn, which is not installed: pip install 'paceline[demo]'")
    return examples_folder()


@dataclass(frozen=True)
class Result:
    """One training, step by step, and how well its network did in the end."""

    epochs: tuple[int, ...]
    """The epoch of each step, from 0."""
    seconds: tuple[float, ...]
    samples: tuple[int, ...]
    accuracy: float
    """On the test set, from 0 to 1."""

    @property
    def warm(self) -> slice:
        """Steps after the first epoch, whose caches are cold and whose shares are not found; else all steps."""
        return slice(self.epochs.count(self.epochs[0]) % len(self.epochs), None)

    @property
    def seconds_an_epoch(self) -> float:
        return sum(self.seconds[self.warm]) / len(set(self.epochs[self.warm]))

    @property
    def samples_per_s(self) -> float:
        return sum(self.samples[self.warm]) / sum(self.seconds[self.warm])

    def of_limit(self, fleet: Sequence[Machine]) -> float:
        """Return the time that the fleet would need at its limit over the time it took, with changes of speed."""
        steps = range(len(self.epochs))[self.warm]
        return sum(self.samples[k] / limit(fleet, k) for k in steps) / sum(self.seconds[self.warm])


def limit(fleet: Sequence[Machine], step: int) -> float:
    """Return samples per second at step ``step`` if nobody ever waited: the sum of the machines' speeds."""
    return sum(1 / machine.seconds(step, 1, begins=False) for machine in fleet)


def equal_speed(fleet: Sequence[Machine], step: int) -> float:
    """Return samples per second at step ``step`` with equal shares: all run at the speed of the slowest."""
    return len(fleet) / max(machine.seconds(step, 1, begins=False) for machine in fleet)


@dataclass(frozen=True)
class Show:
    """The demo, part by part."""

    scripts: Path
    fleet: Sequence[Machine]
    emulate: str
    sample_ms: float
    epochs: int
    run_dir: Path
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def run(self) -> int:
        """Run both parts and print the table; return the exit code of a part that failed or was stopped, else 0."""
        self._introduce()
        self._say(
            "Plain torch DDP",
            "Every machine gets the same share of each batch and all wait for the slowest.",
            equal_speed(self.fleet, 0),
        )
        if code := self._train("plain_ddp.py"):
            return code
        self._say(
            "Paceline",
            "Same network, same batches; now each machine's share follows its measured speed.",
            limit(self.fleet, 0),
        )
        if code := self._train("digits.py"):
            return code
        self._conclude(plain_result(self.run_dir), paceline_result(self.run_dir))
        return 0

    def _introduce(self) -> None:
        takes = [f"{1000 * machine.seconds(0, 1, begins=False):.3g}" for machine in self.fleet]
        listed = ", ".join(takes[:-1]) + f" and {takes[-1]}" if len(takes) > 1 else takes[0]
        self.console.print(
            f"One small network learns handwritten digits on {len(takes)} machines, emulated on this computer: they "
            f"take {listed} ms per sample. The fastest possible is the sum of their speeds, "
            f"[bold]{number(limit(self.fleet, 0))} samples/s[/]."
        )

    def _say(self, title: str, text: str, speed: float) -> None:
        self.console.print()
        self.console.rule(f"[bold]{title}", align="left")
        seconds = duration(self.epochs * DIGITS / speed)
        self.console.print(f"{text} At best {number(speed)} samples/s: {seconds} and a few to start.\n")

    def _train(self, script: str) -> int:
        from paceline.launcher.fixed_fleet import launch_fixed
        from paceline.launcher.supervise import Order, worker_settings

        size = len(self.fleet)
        batch = size * max(1, round(BATCH / size))
        wanted = ("--epochs", str(self.epochs), "--global-batch", str(batch))
        machines = {"emulate": self.emulate, "sample_ms": f"{self.sample_ms:g}"}
        settings = worker_settings(name="demo", run_dir=self.run_dir, **machines)
        command = (sys.executable, "-u", str(self.scripts / script), *wanted)
        return launch_fixed(Order(command, size, settings, self.run_dir))

    def _conclude(self, plain: Result, paced: Result) -> None:
        gain = times(paced.samples_per_s / plain.samples_per_s)
        self.console.print()
        self.console.rule("[bold]Both", align="left")
        self.console.print(table({"plain torch DDP": plain, "Paceline": paced}, self.fleet))
        first = " (all after the first epoch)" if self.epochs > 1 else ""
        self.console.print(
            f"\n[bold]Paceline trained {gain} times as fast[/] on the same machines{first}, with the same "
            f"{plain.samples[0]} samples per step.\nTo read its verdict again:",
        )
        self.console.print(f"paceline report {short_path(self.run_dir)}", soft_wrap=True)
        self.console.print(report_lines(self.run_dir), soft_wrap=True, markup=False)


def table(results: dict[str, Result], fleet: Sequence[Machine]) -> Table:
    """Return the table, with one row per training."""
    shown = Table("", box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for name in ("seconds per epoch", "samples/s", "of the limit", "test accuracy"):
        shown.add_column(name, justify="right")
    for name, result in results.items():
        shown.add_row(
            name,
            f"{result.seconds_an_epoch:.2f}",
            number(result.samples_per_s),
            percent_cell(result.of_limit(fleet)),
            f"{result.accuracy:.1%}",
        )
    return shown


def plain_result(run_dir: Path) -> Result:
    """Return the result that plain_ddp.py has written."""
    written = json.loads((run_dir / "ddp.json").read_text())
    return Result(tuple(written["epochs"]), tuple(written["seconds"]), tuple(written["samples"]), written["accuracy"])


def paceline_result(run_dir: Path) -> Result:
    """Return the result of the Paceline run, from its event log."""
    log = read_log(run_dir)
    last = [event["result"] for event in log.others if event["event"] == "evaluate"][-1]
    return Result(
        tuple(record.epoch for record in log.records),
        tuple(record.wall_s for record in log.records),
        tuple(record.total for record in log.records),
        last["correct"],
    )


def report_lines(run_dir: Path) -> str:
    """Write the report of the Paceline run, and return where it is; without Plotly, how to get one."""
    from paceline.page import write_report

    try:
        return f"To see it, open this in a browser:\n{short_path(write_report(read_log(run_dir)))}"
    except ValueError as error:
        return f"No pictures: {error}. Then: paceline report {short_path(run_dir)} --html"
    except OSError as error:
        return f"No pictures: the report cannot be written ({error.strerror or error})."
