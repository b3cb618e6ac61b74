"""What two workers can do together, one case after another in the same processes; each joins a fleet of its own."""

from __future__ import annotations

import copy
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from exact_cases import Numbers, Scripted
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline

RANK = int(os.environ.get("RANK", "0"))
BATCH = 12
Args = dict[str, Any]


def data(length: int = 48, dtype: torch.dtype = torch.float64) -> TensorDataset:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]).tolist()


def join(pace: Any = "fixed:2,1", **options: Any) -> paceline.Fleet:
    return paceline.join(pace, quiet=True, **options)


def loop(
    fleet: paceline.Fleet,
    model: nn.Module,
    *,
    loss: Callable[..., torch.Tensor] = mse,
    clip: Any = None,
    **options: Any,
) -> Iterator[paceline.Step]:
    """A plain training; without shuffle, each step's samples are the next ones of the dataset, whoever has them."""
    optimizer = sgd(model)
    if options.pop("track", False):
        fleet.track(optimizer=optimizer)
    options = {"global_batch": BATCH, "micro_batch": 3, "shuffle": False} | options
    for step in fleet.steps(options.pop("data", data()), **options):
        for x, y in step:
            step.backward(loss(model, x, y))
        step.commit(optimizer, clip_norm=clip)
        yield step


def one_machine(model: nn.Module, dataset: TensorDataset | None = None, *, clip: float | None = None) -> torch.Tensor:
    """The same training in plain torch, with an optimizer of its own; returns the parameters."""
    optimizer = sgd(model)
    x, y = (dataset or data()).tensors
    for part in torch.arange(len(x)).split(BATCH):
        optimizer.zero_grad()
        mse(model, x[part], y[part]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.tensor(flat(model), dtype=torch.float64)


# -- models --------------------------------------------------------------------------------------------------------


def compiled(args: Args) -> list[float]:
    with join() as fleet:
        model = fleet.model(torch.compile(net(), backend="aot_eager"))
        list(loop(fleet, model))
        return flat(model)


class Shared(nn.Module):
    """A layer used twice, each time under its own checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.reentrant = reentrant
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.shared(x) if self.reentrant is None else checkpoint(self.shared, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.last(x)


def checkpointed(args: Args) -> list[list[float]]:
    results = []
    for reentrant in (True, False):
        with join() as fleet:
            model = fleet.model(Shared(reentrant))
            list(loop(fleet, model))
            results.append(flat(model))
    return results


def averaged(args: Args) -> list[float]:
    """A moving average of the weights, whose own backward is nobody's business."""
    with join() as fleet:
        model = fleet.model(net())
        ema = copy.deepcopy(model)
        for _ in loop(fleet, model):
            mse(ema, *data().tensors).backward()
            mse(copy.deepcopy(model), *data().tensors).backward()
            with torch.no_grad():
                for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
        return flat(model)


def convolution() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 1)).double()


def channels_last(args: Args) -> list[float]:
    with join() as fleet:
        model = fleet.model(convolution().to(memory_format=torch.channels_last))
        list(loop(fleet, model))
        return flat(model)


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.short, self.middle, self.long = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.short.bfloat16()
        self.long.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(self.middle(self.short(x.bfloat16()).float()).double())


def dtypes(args: Args) -> list[float]:
    with join() as fleet:
        model = fleet.model(Mixed())
        list(loop(fleet, model, clip=0.5))
        return flat(model)


def two_models(args: Args) -> list[float]:
    with join() as fleet:
        first, second = fleet.model(net()), fleet.model(Shared(None))
        optimizers = sgd(first), sgd(second)
        for step in fleet.steps(data(), global_batch=BATCH, micro_batch=3, shuffle=False):
            for x, y in step:
                step.backward(mse(first, x, y) + mse(second, x, y))
            step.commit(*optimizers)
        return flat(first) + flat(second)


# -- rounds --------------------------------------------------------------------------------------------------------


def custom_code(args: Args) -> dict[str, Any]:
    """combine, then code of one's own, then commit; one worker sits out."""
    with join("fixed:1,0") as fleet:
        model = fleet.model(net())
        before = flat(model)
        step = next(iter(fleet.steps(data(), global_batch=BATCH, micro_batch=3, shuffle=False)))
        for x, y in step:
            step.backward(mse(model, x, y))
        step.reduce()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step.commit(torch.optim.SGD(model.parameters(), lr=1.0))
        moved = (torch.tensor(before) - torch.tensor(flat(model))).abs()
        return {"gradient": gradient, "moved": [float(moved.min()), float(moved.max())], "loss": step.loss}


def norms(args: Args) -> list[dict[str, Any]]:
    """The gradient's norm: not asked for, clipped in commit, clipped after combine."""
    results = []
    for way in ("plain", "commit", "combine"):
        with join() as fleet:
            model = fleet.model(net())
            step = next(iter(fleet.steps(data(), global_batch=BATCH, micro_batch=3, shuffle=False)))
            for x, y in step:
                step.backward(mse(model, x, y))
            if way == "combine":
                step.reduce()
            step.commit(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=None if way == "plain" else 0.01)
            results.append({"norm": step.grad_norm, "parameters": flat(model)})
    return results


def figures(args: Args) -> list[dict[str, float]]:
    """Figures from both, from the worker that works alone, and from the worker that sits out."""
    with join("fixed:0,1") as fleet:
        model = fleet.model(net())
        optimizer, sums = sgd(model), []
        for step in fleet.steps(data(24), global_batch=BATCH, micro_batch=3):
            step.add(both=1)
            for x, y in step:
                step.add(rows=len(x))
                step.backward(mse(model, x, y))
            if fleet.rank == 0:
                step.add(**{f"idle{step.index}": 0.5})
            step.commit(optimizer)
            sums.append(step.sums)
        return sums


def batch_norm(args: Args) -> dict[str, Any]:
    """One step with batch norm; what this worker's own copy would have, and what the fleet made of it."""
    with join("fixed:2,1") as fleet:
        torch.manual_seed(5)
        model = fleet.model(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
        own = copy.deepcopy(model)
        for step in fleet.steps(data(BATCH), global_batch=BATCH, micro_batch=4):
            for x, y in step:
                own(x)
                step.backward(mse(model, x, y))
            step.commit(sgd(model))
        mine, fleets = ([bn.running_mean.tolist(), bn.running_var.tolist()] for bn in (own[0], model[0]))
        batches = int(model[0].num_batches_tracked)
        return {"samples": step.record.samples[RANK], "mine": mine, "fleet": fleets, "batches": batches}


def precisions(args: Args) -> dict[str, Any]:
    """Worker 0 has no scaler, worker 1 has one and overflows in steps 2 and 3."""
    results: dict[str, Any] = {}
    for autocast in (False, True):
        with join() as fleet:
            model = fleet.model(net().float() if autocast else net())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2, enabled=fleet.rank == 1)
            fleet.track(scaler=scaler)

            def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, autocast: bool = autocast) -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast and RANK == 0):
                    value = nn.functional.mse_loss(model(x).to(y.dtype), y)
                return value * (float("inf") if RANK == 1 and fleet._context.steps.index in (2, 3) else 1.0)

            applied, scales = [], []
            dtype = torch.float32 if autocast else torch.float64
            for step in loop(fleet, model, loss=loss, data=data(96, dtype)):
                applied.append(step.applied)
                scales.append(scaler.get_scale() if fleet.rank == 1 else None)
            samples = sum(record.total for record in fleet.history)
            results[f"autocast {autocast}"] = {
                "applied": applied,
                "scales": scales,
                "samples": samples,
                "parameters": flat(model),
            }
    return results


# -- data ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor([float(number)]) for number in range(self.length))


def seen(fleet: paceline.Fleet, steps: paceline.Steps, model: nn.Module) -> dict[str, Any]:
    optimizer, samples = torch.optim.SGD(model.parameters(), lr=1e-9), {}
    ends, progress = [], []
    for step in steps:
        for x in step:
            samples.setdefault(step.epoch, []).extend(int(value) for value in x.flatten())
            step.backward(model(x).mean())
        step.commit(optimizer)
        ends.append(step.ends_epoch)
        progress.append(step.progress)
    shares = [record.samples for record in fleet.history]
    return {"seen": samples, "shares": shares, "ends": ends, "progress": progress}


def streams(args: Args) -> dict[str, Any]:
    with join("equal") as fleet:
        model = fleet.model(nn.Linear(1, 1))
        return seen(fleet, fleet.steps(Stream((7, 19)[fleet.rank]), global_batch=8, micro_batch=3, epochs=2), model)


def short_data(args: Args) -> list[dict[str, Any]]:
    """A dataset shorter than one global batch; a global batch smaller than the fleet; a single sample."""
    results = []
    for length, global_batch in ((5, 64), (5, 1), (1, 1)):
        with join("adaptive") as fleet:
            model = fleet.model(nn.Linear(1, 1))
            results.append(seen(fleet, fleet.steps(Numbers(length), global_batch=global_batch, epochs=2), model))
    return results


def orders(args: Args) -> list[dict[str, Any]]:
    results = []
    for options in ({"order": lambda epoch: [3, 3, 9, 0, 1][epoch:]}, {"drop_last": True}):
        with join("equal") as fleet:
            model = fleet.model(nn.Linear(1, 1))
            results.append(seen(fleet, fleet.steps(Numbers(10), global_batch=4, epochs=2, **options), model))
    return results


def loader(args: Args) -> dict[str, Any]:
    """Loader processes under shares that move with every step."""
    with join(Scripted(5)) as fleet:
        model = fleet.model(nn.Linear(1, 1))
        batches = DataLoader(Numbers(101), batch_size=4, num_workers=1, persistent_workers=True)
        return seen(fleet, fleet.steps(batches, global_batch=16, epochs=3), model)


def measured(args: Args) -> dict[str, Any]:
    """One machine is eight times slower, by far more than a busy computer's noise."""
    os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"] = "1,8", "2"
    try:
        with join("adaptive") as fleet:
            model = fleet.model(nn.Linear(1, 1))
            return seen(fleet, fleet.steps(Numbers(320), global_batch=16), model)
    finally:
        del os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"]


def memory(args: Args) -> dict[str, Any]:
    """Worker 1 has room for three samples at once, worker 0 for all it gets."""
    os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"] = "1,1!3", "0.001"
    try:
        with join("fixed:1,1") as fleet:
            model = fleet.model(net())
            steps = list(loop(fleet, model, micro_batch="auto", fixed_micro_batch=True))
            total = fleet.evaluate(lambda x, y: {"sum": model(x).sum()}, data(), batch_size=48, sums="sum")
            return {
                "parameters": flat(model),
                "micro_batches": [step.record.micro_batches for step in steps],
                "samples": [step.record.samples for step in steps],
                "evaluated": total,
            }
    finally:
        del os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"]


def sizes(args: Args) -> dict[str, Any]:
    """Each micro-batch takes 20 ms, whatever its size; worker 1 has room for two samples at once."""
    os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"] = "1,1!2", "0.001"

    def slow(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return mse(model, x, y)

    try:
        with join("fixed:1,1") as fleet:
            model = fleet.model(net())
            steps = list(loop(fleet, model, data=data(12 * BATCH), micro_batch="auto", loss=slow))
            return {
                "parameters": flat(model),
                "found": [step.record.micro_size for step in steps],
                "bound": steps[-1].record.memory_bound,
                "ranges": sorted(part for step in steps for mine in step.record.ranges for part in mine),
            }
    finally:
        del os.environ["PACELINE_EMULATE"], os.environ["PACELINE_SAMPLE_MS"]


# -- together ------------------------------------------------------------------------------------------------------


def evaluation(args: Args) -> list[dict[str, Any]]:
    """Tables over any shares: before a loop, after uneven steps, and of a set smaller than the fleet."""
    with join("fixed:5,1") as fleet:
        model = fleet.model(net())

        def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            table = torch.zeros(2, 2, dtype=torch.int64)
            for truth, guess in zip(y > 0, x[:, :1] > 0, strict=True):
                table[int(truth), int(guess)] += 1
            return {"table": table, "sum": y.sum(), "mean": y}

        results = [fleet.evaluate(score, data(47), sums="sum", tables="table")]
        next(loop(fleet, model))
        results += [
            fleet.evaluate(score, data(length), batch_size=5, sums=["sum"], tables=["table"]) for length in (47, 1)
        ]
        made = fleet.run_dir / "made"
        if fleet.is_leader:
            time.sleep(0.3)  # the other worker comes to the barrier first
            made.touch()
        fleet.barrier()
        results += [{"made": made.exists()}]
        results += [{"any": [fleet.any(fleet.rank == 1), fleet.any(False)], "training": model.training}]
        return [{k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in result.items()} for result in results]


def saving(args: Args) -> dict[str, str]:
    """Paths and files that do not work: every worker hears the same, and the fleet goes on."""
    folder, errors = Path(args["folder"]), {}
    contents = {"empty": b"", "cut": None, "text": b"hello"}
    with join() as fleet:
        model = fleet.model(net())
        fleet.track(optimizer=sgd(model))
        fleet.save(folder / "good.pt", extra=[1, 2])
        contents["cut"] = (folder / "good.pt").read_bytes()[:-100]
        attempts: dict[str, Callable[[], Any]] = {"unwritable": lambda: fleet.save("/proc/nowhere/c.pt")}
        for name, content in contents.items():
            if fleet.is_leader:
                (folder / name).write_bytes(content or b"")
            attempts[name] = lambda name=name: fleet.load(folder / name)
        attempts["missing"] = lambda: fleet.load(folder / "missing")
        for name, attempt in attempts.items():
            try:
                attempt()
            except (OSError, ValueError) as error:
                errors[name] = f"{type(error).__name__}: {error}"
        errors["after"] = json.dumps([fleet.load(folder / "good.pt"), fleet.any(True)])
    return errors


def unlike_scalers(args: Args) -> list[float]:
    """A checkpoint of a fleet in which only worker 1 scales its loss."""
    path = Path(args["folder"]) / "mixed.pt"
    for number in range(2):
        with join() as fleet:
            model = fleet.model(net())
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=fleet.rank == 1)
            fleet.track(scaler=scaler)
            if number:
                fleet.load(path)
            list(loop(fleet, model, epochs=1 + number, track=number > 0))  # after a load: it is meant to begin anew
            fleet.save(path)
    return flat(model)


def left_behind(args: Args) -> dict[str, int]:
    """The engine's threads that outlive a fleet, before Python happens to look for garbage."""
    gc.collect()
    gc.disable()
    try:
        with join() as fleet:
            list(loop(fleet, fleet.model(net())))
        until = time.monotonic() + 10.0  # a thread that has ended may be listed a little longer
        while (left := engine_threads()) and time.monotonic() < until:
            time.sleep(0.01)
        return {"gloo": left}
    finally:
        gc.enable()


def engine_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            count += "gloo" in (task / "comm").read_text()
    return count


CASES: tuple[Callable[[Args], Any], ...] = (
    left_behind,
    compiled,
    checkpointed,
    averaged,
    channels_last,
    dtypes,
    two_models,
    custom_code,
    norms,
    figures,
    batch_norm,
    precisions,
    streams,
    short_data,
    orders,
    loader,
    measured,
    memory,
    sizes,
    evaluation,
    saving,
    unlike_scalers,
)


def everything(args: Args) -> dict[str, Any]:
    """Every case, one after another; one that raises does not keep the others from running."""
    results = {}
    for case in CASES:
        try:
            results[case.__name__] = case(args)
        except Exception as error:
            results[case.__name__] = {"error": f"{type(error).__name__}: {error}"}
    return results


if __name__ == "__main__":
    Path(f"parameters of worker {RANK}.json").write_text(json.dumps(averaged({})))
