"""Training scripts put together from habits: what users of other libraries write without a second thought.

`Habits` is one choice of each; `script` is the program as text, plain enough to be read when it fails. It takes two
arguments: where it saves, and a checkpoint to go on from (or nothing). Beside the network every program trains a
ledger, which counts how often the gradient of each sample was applied, and knows nothing of Paceline's own records.

`must_refuse` and `may_refuse` say what the documentation says: which of them cannot be right, so that an error which
says what to write is the only good end, and which may be refused though one could think of a right way.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from textwrap import dedent, indent

import programs
from hypothesis import strategies as st

BEFORE = f"""{programs.BEFORE}
import sys
import time
from pathlib import Path
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

number = torch.arange(48)
data = TensorDataset(x, y, number)
path, load = sys.argv[1], sys.argv[2]

class Noisy(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        return x[i] + 0.1 * torch.randn(4, dtype=torch.float64), y[i], i
{programs.LANGEVIN}
class Ledger(nn.Module):
    # The gradient of a sample's entry in a step is 1 / weight of the step, that of the last entry is 1; both times
    # whatever clipping and learning rates make of them.
    def __init__(self, epochs):
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(49, dtype=torch.float64))
        self.register_buffer("counted", torch.zeros(epochs, 48, dtype=torch.float64))
    def forward(self, numbers, weight):
        return self.entries[numbers].sum() / weight + self.entries[-1]
    @torch.no_grad()
    def book(self, epoch, step):
        if step.applied:
            self.counted[epoch] += self.entries[:-1] / self.entries[-1] * step.record.weight
            self.entries.zero_()

def pause(index, slow):
    # Where a worker is killed and comes back: the training must not be over before.
    if not Path(path).with_name("hurry").exists():
        time.sleep(0.4 if index > slow else 0.02)
"""

LOOPS = ("one", "own", "phases", "unlike phases", *(("accelerate",) if find_spec("accelerate") else ()))
"""The last is Accelerate's own loop, which has a program of its own."""
DATA = ("dataset", "loader", "in order", "noisy", "fresh", "weighted sampler", "subset sampler", "drop last", "split")
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "adam": "torch.optim.Adam(model.parameters(), lr=0.01)",
    "langevin": "Langevin(model.parameters(), lr=0.1)",
}
SCHEDULES = {
    "none": "",
    "epoch": "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)",
    "step": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)",
    "inside": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)",
    "cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(steps))",
}
PACES = ("equal", "fixed:1,3", "adaptive", "auto", "joint", "elastic")


@dataclass(frozen=True)
class Habits:
    """One way to write a training."""

    loop: str = "one"
    data: str = "dataset"
    global_batch: int = 12
    micro_batch: int = 3
    optimizer: str = "sgd"
    tracked: bool = True
    """The optimiser and the schedule."""
    schedule: str = "none"
    update: str = "commit"
    """"commit"; "own": combine, optimizer.step(), a bare commit; "noise": combine, noise on the gradient, commit. Two
    updates: "double": combine, optimizer.step(), commit of the same optimiser; "left": optimizer.step() behind it."""
    average: str = "none"
    """Of the weights: "none", "tracked" or "untracked"; in Accelerate's loop also "by hand"."""
    clip: bool = False
    early: str = "no"
    """"evaluate" each epoch; an early stop whose counter is in fleet.state ("state") or a "plain" variable."""
    weighted: bool = False
    """By a weight that the script gives."""
    reads: str = "none"
    """What the loss is a mean over without saying so: "weights" of the samples, or of their "classes"."""
    unlike: str = "no"
    """What only one worker has: another "split" of the data, or the model in evaluation "mode"."""
    buffer: bool = False
    """Of the model, that follows the steps' losses and enters the next ones."""
    saving: str = "no"
    """"inside" an epoch or "between" two; a second run then goes on from there."""
    main: bool = False
    """Whether the main process alone saves, as Accelerate's loop may have it where nobody comes and goes."""
    save_at: int = 5
    """After which step, when inside an epoch."""
    way: str = "all"
    """How the second run makes its loops: "all" or "rest", or the same without saying so ("unsaid all")."""
    layer: bool = False
    """Between two phases the last layer is replaced."""
    pace: str = "equal"
    """Of a fleet of two; "elastic": one is killed and comes back."""
    killed_at: int = 5

    @property
    def elastic(self) -> bool:
        return self.pace == "elastic"

    @property
    def loads(self) -> bool:
        return self.saving != "no" and not self.elastic

    @property
    def phases(self) -> bool:
        return "phases" in self.loop

    @property
    def epochs(self) -> int:
        """Of the whole training; with phases each has half."""
        return 12 if self.elastic else 4 if self.phases else 3

    def __str__(self) -> str:
        plain = Habits()
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)]
        return ", ".join(text for f, text in zip(fields(self), said) if getattr(self, f.name) != getattr(plain, f.name))


@st.composite
def habits(draw: st.DrawFn) -> Habits:
    """Those that go together."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    loop = pick(*LOOPS)
    if loop == "accelerate":
        return draw(accelerate_habits())
    pace = pick("equal", "equal", "fixed:1,3", "fixed:1,3", "adaptive", "auto", "joint", "joint", "elastic")
    layer = "phases" in loop and pick(False, True)
    schedule = "none" if layer else pick("none", "epoch", "epoch", "step", "step", "cycle", "cycle", "inside")
    if schedule == "cycle" and loop != "one":
        schedule = "step"
    return Habits(
        loop=loop,
        data=(data := pick(*DATA)),
        global_batch=pick(12, 12, 10),
        micro_batch=pick(3, 3, 4, 5),
        optimizer=pick(*OPTIMIZERS),
        tracked=pick(True, True, True, True, False),
        schedule=schedule,
        update=pick(*4 * ("commit", "own", "noise"), "double", "left"),
        average="none" if layer else pick("none", "none", "none", "tracked", "tracked", "untracked"),
        clip=pick(False, True),
        early=pick("no", "evaluate", "state", "plain"),
        weighted=(weighted := pick(False, True)),
        reads="none" if weighted else pick("none", "weights", "classes"),
        unlike=pick(*8 * ("no",), "no" if data == "fresh" else "split", "no" if pace == "elastic" else "mode"),
        buffer=pick(False, False, True),
        saving=pick("no", "inside", "between"),
        save_at=pick(5, 10),
        way=pick("all", "rest", "unsaid all", "unsaid rest"),
        layer=layer,
        pace=pace,
        killed_at=pick(5, 26),
    )


@st.composite
def accelerate_habits(draw: st.DrawFn) -> Habits:
    """Those that go together in Accelerate's own loop."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    pace = pick("equal", "fixed:1,3", "fixed:1,3", "adaptive", "joint", "elastic")
    saving = pick("no", "inside", "between")
    # A run that goes on from an epoch's last update would leave out the schedule's step behind it.
    schedule = pick("none", "step", "cycle", *(("epoch",) if saving != "inside" else ()))
    early = ("no", "evaluate") if saving != "no" or pace == "elastic" else ("no", "evaluate", "plain")
    return Habits(
        loop="accelerate",
        data=pick(*(kind for kind in DATA if kind not in ("fresh", "split"))),
        global_batch=pick(12, 12, 10),
        micro_batch=pick(3, 3, 4, 5),
        optimizer=pick("sgd", "momentum", "adam"),
        schedule=schedule,
        update=pick(*5 * ("commit",), "double"),
        average=pick("none", "none", "tracked", "untracked", "by hand", "by hand"),
        clip=pick(False, True),
        early=pick(*early),
        saving=saving,
        main=saving != "no" and pace != "elastic" and pick(False, True),
        save_at=pick(5, 10),
        pace=pace,
        killed_at=pick(5, 26),
    )


# -- the oracle ------------------------------------------------------------------------------------------------------


def _hidden_state(habits: Habits) -> bool:
    """Whether something has state that nobody tracks."""
    keeps = habits.optimizer != "sgd" or habits.schedule != "none"
    return (not habits.tracked and keeps) or habits.average == "untracked"


def must_refuse(habits: Habits, *, loads: bool) -> str:
    """Why this program must end with an error; empty when it must not. ``loads``: it went on from a checkpoint."""
    if habits.loop == "accelerate" and habits.pace == "joint":
        return "Accelerate's loop has no deadlines"
    if habits.unlike != "no":
        return "workers do not hold the same"
    if habits.schedule == "inside":
        return "the schedule is stepped once a micro-batch"
    if habits.update in ("double", "left"):
        return "a step has two updates"
    if _hidden_state(habits) and (habits.elastic or loads):
        return "state that is not tracked would begin anew"
    counts = habits.loop == "own" or (habits.loop == "phases" and habits.saving == "between")
    if loads and counts and habits.way == "unsaid rest":
        return "nobody says which loops the script makes"
    return ""


def may_refuse(habits: Habits, *, loads: bool) -> bool:
    """Whether an error is a good end as well."""
    if must_refuse(habits, loads=loads):
        return True
    counts = habits.way.startswith("unsaid")  # a number in the checkpoint may be a count of loops
    other_objects = habits.layer and habits.way.endswith("rest")  # it passes by the place where they are tracked
    if loads and (counts or other_objects):
        return True
    return habits.elastic and (habits.early == "plain" or not habits.tracked)


def same_shuffle(habits: Habits) -> bool:
    """Whether a second run goes through the data in the order of the first. One that makes a new dataset for every loop
    and leaves the first loop out does not: the next is taken for another pass over the same data."""
    fresh = habits.loop == "own" and habits.data == "fresh"
    return not (fresh and habits.way.endswith("rest") and habits.saving == "between")


# -- the program -----------------------------------------------------------------------------------------------------


def script(habits: Habits) -> str:
    """The program's text."""
    if habits.loop == "accelerate":
        return accelerate_script(habits)
    parts = [_before_the_loop(habits), _loops(habits), _result(habits)]
    return BEFORE + "\nwith paceline.join() as fleet:\n" + indent("\n".join(part for part in parts if part), "    ")


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _before_the_loop(habits: Habits) -> str:
    named = ["counting=counting", *(["optimizer=optimizer"] if habits.tracked else [])]
    if habits.tracked and habits.schedule not in ("none", "cycle"):
        named.append("scheduler=scheduler")
    if habits.average == "tracked":
        named.append("ema=ema")
    schedule = SCHEDULES[habits.schedule] if habits.schedule != "cycle" else ""
    return _lines(
        "net = network()" if habits.buffer else "",
        'net.register_buffer("seen", torch.zeros((), dtype=torch.float64))' if habits.buffer else "",
        f"model = fleet.model({'net' if habits.buffer else 'network()'})",
        "if fleet.is_leader:\n    model.eval()" if habits.unlike == "mode" else "",
        f"ledger = fleet.model(Ledger({habits.epochs}))",
        f"optimizer = {OPTIMIZERS[habits.optimizer]}",
        "counting = torch.optim.SGD(ledger.parameters(), lr=1.0)",
        f"scheduler = {schedule}" if schedule else "",
        "ema = torch.optim.swa_utils.AveragedModel(model)" if habits.average != "none" else "",
        f"fleet.track({', '.join(named)})",
        _first_values(habits),
        _data(habits),
        _loading(habits) if habits.schedule != "cycle" else "",
    )


def _first_values(habits: Habits) -> str:
    return {
        "state": "fleet.state.best, fleet.state.bad = float('inf'), 0",
        "plain": "best, bad = float('inf'), 0",
    }.get(habits.early, "")


def _data(habits: Habits) -> str:
    size = habits.micro_batch
    made = {
        "dataset": "data",
        "fresh": "data",
        "loader": f"DataLoader(data, {size}, shuffle=True)",
        "in order": f"DataLoader(data, {size})",
        "noisy": "Noisy()",
        "weighted sampler": f"DataLoader(data, {size}, sampler=WeightedRandomSampler(1.0 + number % 4, 48))",
        "subset sampler": f"DataLoader(data, {size}, sampler=SubsetRandomSampler(range(0, 48, 2)))",
        "drop last": f"DataLoader(data, {size}, shuffle=True, drop_last=True)",
        "split": "torch.utils.data.random_split(data, [40, 8], generator=torch.Generator().manual_seed(1))[0]",
    }[habits.data]
    if habits.unlike == "split":
        made = "torch.utils.data.random_split(data, [40, 8], generator=torch.Generator().manual_seed(os.getpid()))[0]"
    return f"training_set = {made}" if made != "data" else ""


def _saved_values(habits: Habits, epoch: str) -> str:
    """What the script gives to ``extra``: as much as it will need."""
    values = [f'"epoch": {epoch}'] if habits.way.endswith("rest") and _counts_loops(habits) else []
    if habits.early == "plain":
        values += ['"best": best', '"bad": bad']
    return f", extra={{{', '.join(values)}}}" if values else ""


def _counts_loops(habits: Habits) -> bool:
    return habits.loop == "own" or habits.phases


def _loading(habits: Habits) -> str:
    said = f', loops="{habits.way}"' if not habits.way.startswith("unsaid") and _counts_loops(habits) else ""
    first = "first = 0" if _counts_loops(habits) else ""
    if not habits.loads:
        return first
    rest = _counts_loops(habits) and habits.way.endswith("rest")
    # Loops that are made again tell again what they told: only what lies within a loop is the script's to bring back.
    back = habits.early == "plain" and (rest or not _counts_loops(habits) or habits.phases)
    return _lines(
        first,
        "if load:",
        f"    extra = fleet.load(load{said})",
        '    first = extra["epoch"]' if rest else "",
        '    best, bad = extra["best"], extra["bad"]' if back else "",
    )


def _loops(habits: Habits) -> str:
    batch = f"global_batch={habits.global_batch}, micro_batch={habits.micro_batch}"
    whole = "training_set" if _data(habits) else "data"
    if habits.loop == "own":
        name = "TensorDataset(x, y, number)" if habits.data == "fresh" else whole
        return _lines(
            f"for epoch in range(first, {habits.epochs}):",
            f"    for step in fleet.steps({name}, {batch}):",
            indent(_step(habits, "epoch"), "        "),
            indent(_end_of_epoch(habits), "    "),
            _save_between(habits, "epoch"),
        )
    if habits.loop == "one":
        cycle = _lines(
            f"scheduler = {SCHEDULES['cycle']}", "fleet.track(scheduler=scheduler)" if habits.tracked else ""
        )
        return _lines(
            f"steps = fleet.steps({whole}, {batch}, epochs={habits.epochs})",
            _lines(cycle, _loading(habits)) if habits.schedule == "cycle" else "",
            "for step in steps:",
            indent(_step(habits, "step.epoch"), "    "),
            indent(_under_ends_epoch(habits, "step.epoch == 0"), "    "),
        )
    half = habits.epochs // 2
    cut = "[:30]" if habits.loop == "unlike phases" else ".flip(0)"
    return _lines(
        f"second = TensorDataset(x{cut}, y{cut}, number{cut})",
        "for phase in range(first, 2):",
        f"    for step in fleet.steps((training_set, second)[phase], {batch}, epochs={half}):".replace(
            "training_set", whole
        ),
        indent(_step(habits, f"{half} * phase + step.epoch"), "        "),
        indent(_under_ends_epoch(habits, ""), "        "),
        indent(_new_layer(habits), "    "),
        _save_between(habits, "phase"),
    )


def _save_between(habits: Habits, loop: str) -> str:
    if habits.saving != "between":
        return ""
    return indent(f"if {loop} == 0:\n    fleet.save(path{_saved_values(habits, '1')})", "    ")


def _new_layer(habits: Habits) -> str:
    if not habits.layer:
        return ""
    made = OPTIMIZERS[habits.optimizer]
    track = "\n    fleet.track(second_optimizer=optimizer)" if habits.tracked else ""
    return (
        dedent(
            f"""\
        if phase == 0:
            torch.manual_seed(7 + fleet.rank)
            model[2] = nn.Linear(8, 3).double()
            optimizer = {made}"""
        )
        + track
    )


def _step(habits: Habits, epoch: str) -> str:
    """One step: micro-batches, the update, and what follows it."""
    clip = ", clip_norm=1.5" if habits.clip else ""
    out = "model(a) * (1 + 0.01 * model.seen)" if habits.buffer else "model(a)"
    if habits.weighted or habits.reads == "weights":
        loss = _lines(
            "    w = 1.0 + i % 3" if habits.weighted else "    w = 1.0 + 0.37 * (i % 3).double()",
            f"    loss = (nn.functional.cross_entropy({out}, b, reduction='none') * w).sum() / w.sum()",
            f"    step.backward(loss + ledger(i, w.sum()){', weight=w.sum()' if habits.weighted else ''})",
        )
    elif habits.reads == "classes":
        loss = _lines(
            "    rarity = torch.tensor([0.5, 1.3, 2.1], dtype=torch.float64)",
            f"    loss = nn.functional.cross_entropy({out}, b, weight=rarity)",
            "    step.backward(loss + ledger(i, rarity[b].sum()))",
        )
    else:
        loss = f"    step.backward(nn.functional.cross_entropy({out}, b) + ledger(i, len(i)))"
    update = {
        "commit": f"step.commit(optimizer, counting{clip})",
        "own": _lines(
            "step.reduce()",
            "nn.utils.clip_grad_norm_(model.parameters(), 1.5)" if habits.clip else "",
            "optimizer.step()",
            "counting.step()",
            "step.commit()",
        ),
        "noise": _lines(
            "step.reduce()",
            "for p in model.parameters():",
            "    if p.grad is not None:",
            "        p.grad.add_(0.01 * torch.randn_like(p.grad))",
            f"step.commit(optimizer, counting{clip})",
        ),
        "double": _lines("step.reduce()", "optimizer.step()", f"step.commit(optimizer, counting{clip})"),
        "left": _lines(f"step.commit(optimizer, counting{clip})", "optimizer.step()", "optimizer.zero_grad()"),
    }[habits.update]
    inside = habits.saving == "inside" and not (habits.loop == "one" or habits.phases)
    return _lines(
        "for a, b, i in step:",
        loss,
        "    scheduler.step()" if habits.schedule == "inside" else "",
        update,
        f"ledger.book({epoch}, step)",
        "model.seen.mul_(0.9).add_(step.loss if step.applied else 0.0)" if habits.buffer else "",
        "scheduler.step()" if habits.schedule in ("step", "cycle") else "",
        "ema.update_parameters(model)" if habits.average != "none" else "",
        f"pause(step.index, {habits.killed_at + 2})" if habits.elastic else "",
        _save_inside(habits, "epoch") if inside else "",
    )


def _save_inside(habits: Habits, loop: str) -> str:
    return f"if step.index == {habits.save_at}:\n    fleet.save(path{_saved_values(habits, loop)})"


def _end_of_epoch(habits: Habits) -> str:
    score = (
        'fleet.evaluate(lambda a, b, i: {"loss": nn.functional.cross_entropy(model(a), b) * len(a)}, data, '
        'sums="loss")["loss"]'
    )
    where = "fleet.state." if habits.early == "state" else ""
    patience = "5" if habits.elastic else "2"
    return _lines(
        "scheduler.step()" if habits.schedule == "epoch" else "",
        f"score = {score}" if habits.early != "no" else "",
        _lines(
            f"{where}bad = {where}bad + 1 if score > 0.97 * {where}best else 0",
            f"{where}best = min({where}best, score)",
            f"if {where}bad >= {patience}:\n    break",
        )
        if habits.early in ("state", "plain")
        else "",
    )


def _under_ends_epoch(habits: Habits, first: str) -> str:
    """What a loop over several epochs does at the end of each, and its checkpoint."""
    loop = "phase" if habits.phases else ""
    block = _end_of_epoch(habits)
    stop = ""
    if block.endswith("    break"):  # the checkpoint comes before it
        block, stop = block.rsplit("\n", 2)[0], "\n".join(block.rsplit("\n", 2)[1:])
    if first and habits.saving == "between":
        block = _lines(block, f"if {first}:", f"    fleet.save(path{_saved_values(habits, '0')})")
    return _lines(
        "if step.ends_epoch:\n" + indent(block, "    ") if block else "",
        "if step.ends_epoch:\n" + indent(stop, "    ") if stop else "",
        _save_inside(habits, loop) if habits.saving == "inside" else "",
    )


def _result(habits: Habits) -> str:
    ema = ", flat(ema)" if habits.average != "none" else ""
    return (
        f'result = {{"weights": [flat(model){ema}], "rate": optimizer.param_groups[0]["lr"], '
        '"counted": ledger.counted.tolist()}\n'
    )


# -- Accelerate's own loop -------------------------------------------------------------------------------------------

ACCELERATE = """
from copy import deepcopy
from accelerate.utils import DataLoaderConfiguration
from paceline.adapters.accelerate import Accelerator

class Counter:
    updates = 0
    def state_dict(self):
        return {"updates": self.updates}
    def load_state_dict(self, state):
        self.updates = state["updates"]
"""


def accelerate_script(habits: Habits) -> str:
    """The same training as a script for Accelerate: a loader's batch is an update, of which each process has a part."""
    size, save = habits.global_batch, habits.saving
    rest = {"weighted sampler": ", sampler=WeightedRandomSampler(1.0 + number % 4, 48)", "in order": ""}
    rest |= {
        "subset sampler": ", sampler=SubsetRandomSampler(range(0, 48, 2))",
        "drop last": ", shuffle=True, drop_last=True",
    }
    kept = ["counter", *(["ema"] if habits.average in ("tracked", "by hand") else [])]
    saves = (
        "if accelerator.is_main_process:\n    accelerator.save_state(path)"
        if habits.main
        else ("accelerator.save_state(path)")
    )
    averages = {
        "none": ("", ""),
        "by hand": (
            "ema = deepcopy(model).requires_grad_(False)",
            "for mean, p in zip(ema.parameters(), model.parameters()):\n    mean.data.lerp_(p.data, 0.1)",
        ),
    }
    made, moves = averages.get(
        habits.average, ("ema = torch.optim.swa_utils.AveragedModel(model)", "ema.update_parameters(model)")
    )
    schedule = SCHEDULES[habits.schedule].replace("len(steps)", f"{habits.epochs} * len(loader)")
    data = "Noisy()" if habits.data == "noisy" else "data"
    before = _lines(
        "config = DataLoaderConfiguration(split_batches=True)",
        f"sizes = {{'global_batch': {size}, 'micro_batch': {habits.micro_batch}}}",
        "accelerator = Accelerator(seed=0, dataloader_config=config, **sizes)",
        f"model, ledger = network(), Ledger({habits.epochs})",
        f"optimizer = {OPTIMIZERS[habits.optimizer]}",
        "counting = torch.optim.SGD(ledger.parameters(), lr=1.0)",
        f"loader = DataLoader({data}, {size}{rest.get(habits.data, ', shuffle=True')})",
        "model, ledger, optimizer, counting, loader, test = accelerator.prepare(",
        "    model, ledger, optimizer, counting, loader, DataLoader(data, 10))",
        f"scheduler = accelerator.prepare({schedule})" if schedule else "",
        made,
        "counter = Counter()",
        f"accelerator.register_for_checkpointing({', '.join(kept)})",
        "best, bad, first, skip = float('inf'), 0, 0, 0",
        "if load:\n    accelerator.load_state(load)\n    first, skip = divmod(counter.updates, len(loader))"
        if habits.loads
        else "",
    )
    update = _lines(
        "accelerator.backward(nn.functional.cross_entropy(model(a), b) + ledger(i, len(i)))",
        "accelerator.clip_grad_norm_(model.parameters(), 1.5)" if habits.clip else "",
        "optimizer.step()",
        "optimizer.step()" if habits.update == "double" else "",
        "counting.step()",
        "scheduler.step()" if habits.schedule in ("step", "cycle") else "",
        "optimizer.zero_grad()",
        "if accelerator.sync_gradients:",
        indent(
            _lines(
                "ledger.book(epoch, accelerator.last_step)",
                "counter.updates += 1",
                moves,
                f"pause(counter.updates, {habits.killed_at + 2})" if habits.elastic else "",
                f"if counter.updates == {habits.save_at}:\n{indent(saves, '    ')}" if save == "inside" else "",
            ),
            "    ",
        ),
    )
    scored = _lines(
        "model.eval(), ledger.eval()",
        "score = 0.0",
        "for a, b, i in test:",
        "    with torch.no_grad():",
        "        loss = nn.functional.cross_entropy(model(a), b, reduction='none')",
        "    score += accelerator.gather_for_metrics(loss).sum().item()",
    )
    stops = "bad, best = bad + 1 if score > 0.97 * best else 0, min(best, score)\nif bad >= 2:\n    break"
    loop = _lines(
        f"for epoch in range(first, {habits.epochs}):",
        "    model.train(), ledger.train()",
        "    batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == first else loader",
        "    for a, b, i in batches:",
        indent(update, "        "),
        "    scheduler.step()" if habits.schedule == "epoch" else "",
        indent(scored, "    ") if habits.early != "no" else "",
        indent(f"if epoch == 0:\n{indent(saves, '    ')}", "    ") if save == "between" else "",
        indent(stops, "    ") if habits.early == "plain" else "",
    )
    return _lines(BEFORE, ACCELERATE, before, loop, _result(habits), "accelerator.end_training()") + "\n"
