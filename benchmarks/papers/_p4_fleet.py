"""P4 through real processes: a training that a twin in one process must repeat, and rounds against arrivals.

The fleet's workers note which samples each of their local steps had; the twin makes the same steps, one worker after
another, with the library's rules and failures but none of its loop, transport or threads.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _p4_grid import network, pictures
from _smoke import forked, smoking
from torch import Tensor, nn

import paceline
from paceline.averaging.periods import make_new
from paceline.gradients import second_order
from paceline.machines.failures import parse_failures
from paceline.research.elastic_average import ElasticAverage

CASE, FOLDER = "P4_CASE", "P4_FOLDER"
"""Variables by which a worker knows what to train, and where to leave what came of it."""
BATCH = 16


def hessian_is_there() -> bool:
    try:
        import pytorch_optimizer  # noqa: F401
    except ImportError:
        return False
    return True


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adahessian":
        from pytorch_optimizer import AdaHessian

        return AdaHessian(parameters, lr=0.05, eps=1e-4)  # type: ignore[no-any-return]
    momentum = 0.9 if name == "nesterov" else 0.0
    return torch.optim.SGD(parameters, lr=0.02 if momentum else 0.1, momentum=momentum, nesterov=momentum > 0)


# -- a worker ---------------------------------------------------------------------------------------------------------


def launch(case: Mapping[str, Any], workers: int, *, script: str, **options: str) -> list[Any]:
    """What each worker left. ``options``: of paceline run, such as failures= and emulate=."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {CASE: json.dumps(case), FOLDER: folder, "PACELINE_RUN_DIR": f"{folder}/run"}
        torch.save(data_of(case), Path(folder) / "data.pt")
        if smoking():
            forked(work, workers, **shared, **{f"PACELINE_{name.upper()}": text for name, text in options.items()})
        else:
            command = [sys.executable, "-m", "paceline.cli", "run", "-q", "-n", str(workers), "--output-dir", folder]
            flags = [part for name, text in options.items() for part in (f"--{name.replace('_', '-')}", text)]
            del shared["PACELINE_RUN_DIR"]
            subprocess.run([*command, *flags, script], env={**os.environ, **shared, "OMP_NUM_THREADS": "1"}, check=True)
        return [json.loads((Path(folder) / f"worker-{rank}.json").read_text()) for rank in range(workers)]


def work() -> None:
    """A worker's whole life."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Using backward.. with create_graph")
    case = json.loads(os.environ[CASE])
    told = train(case) if case["what"] == "twin" else races(case)
    (Path(os.environ[FOLDER]) / f"worker-{told['rank']}.json").write_text(json.dumps(told))


def data_of(case: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Images and labels to train on and to test with: a part of a data set, as the launching process has left it for
    its workers; of ``none``, noise with labels that depend on it."""
    if FOLDER in os.environ:
        return tuple(torch.load(Path(os.environ[FOLDER]) / "data.pt"))
    if case["dataset"] == "none":
        noise = torch.randn(case["samples"], 1, 28, 28, generator=torch.Generator().manual_seed(0))
        return noise, noise[:, 0, ::3, ::3].flatten(1)[:, :10].argmax(1)
    images, count = pictures(case["dataset"]), case["samples"]
    return images.train[:count].clone(), images.train_labels[:count].clone(), images.test, images.test_labels


def train(case: Mapping[str, Any]) -> dict[str, Any]:
    """A training in double precision; every local step's round and samples, and the centre at the end."""
    combine = ElasticAverage(**case["settings"])
    with paceline.join("equal", combine=combine, quiet=True, device="cpu", seed=case["seed"]) as fleet:
        torch.manual_seed(case["seed"])
        model = fleet.model(network().double())
        optimizer = optimizer_of(case["optimiser"], model.parameters())
        fleet.track(optimizer=optimizer)
        x, y, *_ = data_of(case)
        data = torch.utils.data.TensorDataset(x.double(), y, torch.arange(len(x)))
        done: list[tuple[int, list[int]]] = []
        for step in fleet.steps(data, global_batch=BATCH * fleet.world_size, micro_batch=BATCH, epochs=case["epochs"]):
            samples: list[int] = []
            for inputs, labels, places in step:
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
                samples += places.tolist()
            torch.manual_seed(signs_seed(fleet.rank, len(done)))
            if samples:
                done.append((step.round, samples))
            step.commit(optimizer)
        final = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return {"rank": fleet.rank, "steps": done, "final": final.tolist(), "rounds": len(fleet.history)}


def signs_seed(worker: int, local: int) -> int:
    """Of the random signs with which AdaHessian looks at the curvature."""
    return 1_000_003 * (worker + 1) + local


# -- the twin ---------------------------------------------------------------------------------------------------------


def twin(case: Mapping[str, Any], steps: Sequence[Sequence[tuple[int, list[int]]]], rounds: int) -> Tensor:
    """The centre after the same local steps: ``steps`` of each worker, as (round, samples)."""
    settings, workers = ElasticAverage(**case["settings"]), len(steps)
    failures, memory = parse_failures(case.get("failures", ""), seed=case["seed"]), settings.memory(workers)
    torch.manual_seed(case["seed"])
    first = [parameter.detach().clone() for parameter in network().double().parameters()]
    centre, own = [part.clone() for part in first], [_worker(case, first) for _ in range(workers)]
    x, y, *_ = data_of(case)
    x = x.double()
    made = [0] * workers
    for number in range(rounds):
        fates = [failures.at(worker=worker, round=number) for worker in range(workers)]
        for worker, (model, optimizer) in enumerate(own):
            if fates[worker].returns_with is not None:
                _set(model, first)
                make_new(optimizer)
            while made[worker] < len(steps[worker]) and steps[worker][made[worker]][0] == number:
                _local_step(model, optimizer, x, y, steps[worker][made[worker]][1], signs_seed(worker, made[worker]))
                made[worker] += 1
        _exchange(settings, memory, own, centre, [fate.exchanges for fate in fates])
    return torch.cat([part.flatten() for part in centre])


def _worker(case: Mapping[str, Any], first: Sequence[Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network().double()
    _set(model, first)
    return model, optimizer_of(case["optimiser"], model.parameters())


@torch.no_grad()
def _set(model: nn.Module, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def _local_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, places: list[int], seed: int
) -> None:
    second, parameters = second_order.needs_graph(optimizer), list(model.parameters())
    loss = nn.functional.cross_entropy(model(x[places]), y[places])
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, create_graph=second), strict=True):
        parameter.grad = gradient
    torch.manual_seed(seed)
    second_order.step(optimizer) if second else optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _exchange(
    settings: ElasticAverage, memory: Any, own: Sequence[Any], centre: list[Tensor], there: list[bool]
) -> None:
    ways = [[p - c for p, c in zip(model.parameters(), centre, strict=True)] for model, _ in own]
    lengths = [math.sqrt(sum(float(part.norm()) ** 2 for part in way)) for way in ways]
    exchange = settings.weigh(memory, lengths, there)
    kept = settings.momentum_kept(exchange.pull, len(own))
    for worker, (model, optimizer) in enumerate(own):
        for parameter, way in zip(model.parameters(), ways[worker], strict=True):
            parameter.sub_(float(exchange.pull[worker]) * way)
        for state in optimizer.state.values():
            for name in ("momentum_buffer", "exp_avg"):
                if isinstance(state.get(name), Tensor) and kept[worker] < 1:
                    state[name].mul_(float(kept[worker]))
    for place, part in enumerate(centre):
        part += sum(float(push) * way[place] for push, way in zip(exchange.push, ways, strict=True))


def apart(case: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> float:
    """The largest difference between the fleet's centre and the twin's, over all parameters."""
    centre = twin(case, [one["steps"] for one in told], told[0]["rounds"])
    return max(float((torch.tensor(one["final"], dtype=torch.float64) - centre).abs().max()) for one in told)


# -- rounds against arrivals ------------------------------------------------------------------------------------------


def races(case: Mapping[str, Any]) -> dict[str, Any]:
    """One training after another, in the same processes: each a pace and a way to exchange."""
    runs = {name: race(case, pace, exchange) for name, (pace, exchange) in case["ways"].items()}
    return {"rank": int(os.environ["RANK"]), **runs}


def race(case: Mapping[str, Any], pace: str, exchange: Any) -> dict[str, Any]:
    """Seconds of training (without evaluation) and test accuracy of the centre after each epoch; samples done."""
    x, y, test_x, test_y = data_of(case)
    data, tests = torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(test_x, test_y)
    combine = ElasticAverage(tau=case["tau"], exchange=exchange)
    curve: list[tuple[float, float]] = []
    with paceline.join(pace, combine=combine, quiet=True, device="cpu", seed=case["seed"]) as fleet:
        torch.manual_seed(case["seed"])
        model = fleet.model(network())
        optimizer = optimizer_of("nesterov", model.parameters())
        began, samples = time.perf_counter(), 0
        for step in fleet.steps(data, global_batch=BATCH * fleet.world_size, micro_batch=BATCH, epochs=case["epochs"]):
            for inputs, labels in step:
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
                samples += len(labels)
            step.commit(optimizer)
            if step.ends_epoch:
                stopped = time.perf_counter()
                hit = fleet.evaluate(lambda x, y: {"hit": model(x).argmax(1) == y}, tests)
                curve.append((stopped - began, hit["hit"]))
                began += time.perf_counter() - stopped
        return {"curve": curve, "samples": samples}
