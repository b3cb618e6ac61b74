"""Trainings whose losses and weights do not depend on time, each played by one source tree; see same_numbers.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline import concurrency

LENGTH, BATCH, EPOCHS = 50, 12, 2


@dataclass(frozen=True)
class Case:
    """One training: the pace and combine are those of `paceline.join`; ``killed_at``: a worker dies in that step."""

    workers: int = 2
    pace: Any = "fixed:3,1"
    combine: Callable[[], Any] = lambda: "gradients"
    optimizer: str = "sgd"
    model: str = "mlp"
    micro_batch: int = 4
    clip: float | None = None
    wire: str | None = None
    stream: bool = False
    weighted: bool = False
    two_losses: bool = False
    calls: bool = False
    saved: bool = False
    killed_at: int | None = None
    sample_s: tuple[float, ...] = ()
    """Seconds that a sample takes each worker, on a clock of the case's own; none: the clock is real, and not read."""
    dtype: torch.dtype = torch.float32


CASES: dict[str, Case] = {
    "fixed": Case(),
    "fixed, three workers": Case(workers=3, pace="fixed:1,4,2"),
    "equal": Case(pace="equal"),
    "adaptive": Case(workers=3, pace="adaptive", sample_s=(0.001, 0.0015, 0.004)),
    "adaptive, batch norm": Case(pace="adaptive", model="norm", sample_s=(0.001, 0.0027)),
    "epoch": Case(workers=3, pace="epoch", sample_s=(0.001, 0.0015, 0.004)),
    "a worker without a share": Case(pace="fixed:0,1"),
    "alone": Case(workers=1, pace="equal"),
    "float64": Case(dtype=torch.float64),
    "AdamW, clipped": Case(optimizer="adamw", clip=0.5),
    "batch norm": Case(model="norm"),
    "a buffer that forward changes": Case(model="centre"),
    "unequal weights": Case(weighted=True),
    "two losses per micro-batch": Case(model="pair", two_losses=True),
    "a stream": Case(stream=True),
    "bf16 on the wire": Case(wire="bf16", workers=3, pace="fixed:1,4,2"),
    "evaluate and predict between steps": Case(calls=True),
    "saved and gone on from": Case(saved=True, optimizer="adamw"),
    "average": Case(combine=lambda: paceline.Averaging(every_steps=2)),
    "average, wp weights": Case(combine=lambda: paceline.Averaging(every_steps=3, weights="wp")),
    "average, outer optimiser": Case(
        combine=lambda: paceline.Averaging(every_steps=2, outer=paceline.Outer(lr=0.7, momentum=0.9))
    ),
    "average, int8 on the wire": Case(combine=lambda: paceline.Averaging(every_steps=2), wire="int8"),
    "elastic average": Case(combine=lambda: paceline.research.ElasticAverage()),
    "a worker dies": Case(workers=3, pace="equal", killed_at=3),
    "a worker dies in batch norm's fleet": Case(workers=3, pace="equal", model="norm", killed_at=4),
}


class CaseClock:
    """A clock that stands still for the user's thread but while a sample is worked on: measured times repeat exactly.

    Waits are real, and take no time on it. So the paces that set no deadlines learn the same from every run. A round
    with a deadline is another matter: how many micro-batches end before it, and who comes first, is decided by waits of
    several threads on the real clock, and the bits differ from run to run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._real = concurrency.perf_counter

    def perf_counter(self) -> float:
        return self.now if threading.current_thread() is threading.main_thread() else self._real()


class Centre(nn.Module):
    """A layer with a running centre, which forward moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.detach().mean(0), 0.1)
        return x - self.centre


class Stream(IterableDataset):
    """The samples of a dataset, one after another."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data[index] for index in range(len(self.data)))


def make_model(kind: str, dtype: torch.dtype) -> nn.Module:
    """Return a small model with weights from a fixed seed."""
    torch.manual_seed(1)
    middle: list[nn.Module] = {"norm": [nn.BatchNorm1d(8)], "centre": [Centre(8)]}.get(kind, [])
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype: torch.dtype) -> TensorDataset:
    """Return the training set: inputs, classes and a weight per sample."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(LENGTH, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, x[:, :3].argmax(1), torch.rand(LENGTH, generator=generator, dtype=torch.float64).to(dtype))


def train(name: str, folder: str) -> dict[str, Any]:
    """Train one case on this worker; return its losses and what its models hold."""
    case, dataset, losses = CASES[name], data(CASES[name].dtype), []
    clock = CaseClock()
    if case.sample_s:
        concurrency.perf_counter = clock.perf_counter
    wire = {} if case.wire is None else {"comm_dtype": case.wire}
    with paceline.join(pace=case.pace, combine=case.combine(), quiet=True, seed=3, **wire) as fleet:
        model = fleet.model(make_model(case.model, case.dtype))
        other = fleet.model(nn.Linear(5, 1).to(case.dtype)) if case.model == "pair" else None
        parameters = [p for one in (model, other) if one is not None for p in one.parameters()]
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[case.optimizer]
        optimizer = kind(parameters, lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        fleet.track(optimizer=optimizer, schedule=schedule)
        steps = fleet.steps(
            Stream(dataset) if case.stream else dataset,
            global_batch=BATCH,
            micro_batch=case.micro_batch,
            epochs=1 if case.stream else EPOCHS,
        )
        path = Path(folder) / "saved.pt"
        if case.saved and path.exists():
            fleet.load(path)
        for step in steps:
            for x, y, weight in step:
                if case.killed_at == step.index and fleet.rank == 1 and not (died := Path(folder) / "died").exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if case.sample_s:
                    clock.now += case.sample_s[fleet.rank] * len(x)
                each = nn.functional.cross_entropy(model(x), y, reduction="none")
                loss = (each * weight).sum() / weight.sum() if case.weighted else each.mean()
                if other is None or not case.two_losses:
                    step.backward(loss)
                else:
                    step.backward(loss, models=model)
                    step.backward(nn.functional.mse_loss(other(x)[:, 0], weight), models=other)
            step.commit(optimizer, clip_norm=case.clip)
            schedule.step()
            losses += [step.loss, *(step.record.samples if step.record is not None else ())]
            if case.calls and step.index % 3 == 1:
                score = fleet.evaluate(lambda x, y, w: {"right": (model(x).argmax(1) == y).double()}, dataset)
                losses += [score["right"], float(fleet.predict(lambda x, y, w: model(x), dataset).double().sum())]
            if case.saved and step.index == 3 and not path.exists():
                fleet.save(path)
                break
        return {"losses": losses, "weights": [_bytes(model), *([] if other is None else [_bytes(other)])]}


def _bytes(model: nn.Module) -> dict[str, str]:
    state = model.state_dict()
    return {name: tensor.detach().cpu().double().numpy().tobytes().hex() for name, tensor in state.items()}


def play(name: str) -> Any:
    """Play a case in processes of its own; return what its workers found."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        if case.killed_at is not None:
            return _play_elastic(name, folder)
        options: dict[str, Any] = {"workers": case.workers, "method": "fork", "run_dir": Path(folder) / "run"}
        found = [paceline.launch(train, name, folder, **options)]
        if case.saved:
            options["run_dir"] = Path(folder) / "again"
            found.append(paceline.launch(train, name, folder, **options))
        return found


def _play_elastic(name: str, folder: str) -> Any:
    """Play a case in which a worker dies for good, under the launcher of fleets that go on."""
    case, out = CASES[name], Path(folder) / "found"
    out.mkdir()
    environment = {**os.environ, "SAME_NUMBERS_OUT": str(out)}
    command = [sys.executable, "-m", "paceline.cli", "run", "-q", "-n", f"2:{case.workers}", "--output-dir", folder]
    subprocess.run([*command, __file__, "worker", name, folder], env=environment, check=True, timeout=120)
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def main() -> None:
    """Play the cases named on the command line, and print what each found as one JSON line."""
    if sys.argv[1] == "worker":
        if (Path(sys.argv[3]) / "died").exists():  # started again: it does not come back
            return
        found = train(sys.argv[2], sys.argv[3])
        out = Path(os.environ["SAME_NUMBERS_OUT"]) / f"{os.environ.get('PACELINE_WORKER', os.getpid())}.json"
        out.write_text(json.dumps(found))
        return
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(json.dumps([name, play(name)]), flush=True)


if __name__ == "__main__":
    main()
