"""Every block of docs/porting.md, taken from its text and run: it trains as plain torch does, or is refused.

A comment before a block says where the block stands and names its case: a whole ``script``, under the ``frame`` that
the page begins with, or in the ``step`` of its loop; ``again`` is run twice, the second time from the first one's
checkpoint; ``elastic`` in a fleet whose workers may come and go; the lines of an ``import`` are executed. Of a diff
the lines of "here" are run. The page's tables of what is refused have the line and the words to expect in each row.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch
from programs import BEFORE, apart, elastic, refusals, results
from torch import nn

from paceline.feed import KeyedPermutation, key

pytestmark = pytest.mark.fleet

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (\w+): ([\w-]+) -->\n)?^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

DATA = """
import math
from itertools import islice
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler, IterableDataset

seed, Net, path = 0, network, os.environ["CHECKPOINT"]
x, y = torch.randn(200, 4, dtype=torch.float64), torch.randint(0, 3, (200,))
dataset = TensorDataset(x, y)
test_set = TensorDataset(x[:50], y[:50])
pairs = TensorDataset(x, torch.randn(200, 2, dtype=torch.float64))

class Noisy(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, number):
        a, b = dataset[number]
        return a + torch.randn(4, dtype=torch.float64), b

noisy = Noisy()

class Stream(IterableDataset):
    def __iter__(self):
        for number in range(200):
            yield dataset[number]

class Writer:
    def __init__(self):
        self.told = []
    def add_scalar(self, name, value, step):
        self.told.append([name, value, step])

writer = Writer()

def Generator():
    torch.manual_seed(7)
    return nn.Linear(2, 4).double()

def Discriminator():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

def d_loss(d, real, fake):
    right, wrong = d(real), d(fake)
    return bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))

def g_loss(d, fake):
    judged = d(fake)
    return bce(judged, torch.ones_like(judged))

torch.manual_seed(int(os.environ.get("RANK", 0)))  # as many scripts do, and it must not matter
asked = []

def out_of_time():  # one worker alone finds so, at its seventh step
    asked.append(None)
    last = int(os.environ.get("WORLD_SIZE", 1)) - 1
    return len(asked) == 7 and int(os.environ.get("RANK", 0)) == last
"""
FRAME = """
model = fleet.model(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fleet.track(optimizer=optimizer)
"""
LOOP = """
for step in fleet.steps(dataset, global_batch=64, micro_batch=16, epochs=5):
    for x, y in step:
        step.backward(loss_fn(model(x), y))
"""


@dataclass(frozen=True)
class Block:
    place: str
    name: str
    kind: str
    text: str

    def side(self, sign: str) -> str:
        """What is written here ("+") or there ("-")."""
        if self.kind == "python":
            return self.text
        return "".join(line[1:] for line in self.text.splitlines(keepends=True) if line[0] in (sign, " "))

    def script(self) -> str:
        here = self.side("+")
        if self.place == "step":
            here = LOOP + indent(here, "    ")
        return here if "paceline.join(" in here else framed(here)


def framed(text: str) -> str:
    return "with paceline.join() as fleet:\n" + indent(FRAME + text, "    ")


BLOCKS = [Block(*(part or "" for part in found)) for found in BLOCK.findall(PAGE)]
NAMED = {block.name: block for block in BLOCKS}


# -- the same in plain torch, in one process, with whole batches -----------------------------------------------------


class Plain:
    """The page's data and network, and its training in the fleet's order of samples."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        exec(BEFORE + DATA.replace('os.environ["CHECKPOINT"]', "None"), self.names)
        self.x, self.y = self.names["dataset"].tensors
        self.test = self.names["test_set"].tensors
        self.loss_fn: Callable[..., torch.Tensor] = self.names["loss_fn"]
        self.model: nn.Module = self.names["network"]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[float] = []

    def flat(self, *models: nn.Module) -> list[float]:
        found: list[float] = self.names["flat"](*models)
        return found

    def batches(self, *, epochs: int = 5, shuffle: bool = True) -> list[tuple[int, torch.Tensor, bool]]:
        """Of each step: the epoch, the samples' numbers, and whether it ends the epoch."""
        found = []
        for epoch in range(epochs):
            where = np.arange(200)
            order = torch.from_numpy(KeyedPermutation(200, key(0, epoch))(where) if shuffle else where)
            found += [(epoch, numbers, len(numbers) < 64) for numbers in order.split(64)]
        return found

    def update(self, numbers: torch.Tensor, on_gradient: Callable[[list[nn.Parameter]], object] | None = None) -> None:
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(self.x[numbers]), self.y[numbers])
        loss.backward()
        self.losses.append(loss.item())
        if on_gradient is not None:
            on_gradient(list(self.model.parameters()))
        self.optimizer.step()

    def test_loss(self) -> float:
        with torch.no_grad():
            return self.loss_fn(self.model(self.test[0]), self.test[1]).item()


def trained(steps: int | None = None, *, epochs: int = 5, on_gradient: Any = None, shuffle: bool = True) -> list[float]:
    plain = Plain()
    for _, numbers, _ in plain.batches(epochs=epochs, shuffle=shuffle)[:steps]:
        plain.update(numbers, on_gradient)
    return plain.flat(plain.model)


def clipped(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def clamped(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 0.01)


def scheduled(
    per_step: Callable[..., Any] | None,
    per_epoch: Callable[..., Any] | None,
    *,
    alike: bool = False,
    clip: bool = False,
) -> list[float]:
    """``alike``: the schedule of steps goes on with the last step of an epoch too."""
    plain = Plain()
    step = per_step(plain.optimizer) if per_step else None
    epoch = per_epoch(plain.optimizer) if per_epoch else None
    for _, numbers, ends in plain.batches():
        plain.update(numbers, clipped if clip else None)
        if step and (alike or not ends):
            step.step()
        if epoch and ends:
            epoch.step()
    return plain.flat(plain.model)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 8))


def fading(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def averages() -> list[float]:
    plain = Plain()
    every: list[list[torch.Tensor]] = []
    at_the_end: list[list[torch.Tensor]] = []
    for epoch, numbers, ends in plain.batches():
        plain.update(numbers)
        now = [p.detach().clone() for p in plain.model.parameters()]
        every.append(now if not every else [0.9 * old + 0.1 * new for old, new in zip(every[-1], now, strict=True)])
        at_the_end += [now] if ends and epoch >= 3 else []
    means = [torch.stack(parts).mean(0) for parts in zip(*at_the_end, strict=True)]
    return [value for part in (*every[-1], *means) for value in part.flatten().tolist()]


def of_tokens() -> list[float]:
    plain = Plain()
    for _, numbers, _ in plain.batches():
        plain.update(numbers[plain.y[numbers] != 0])
    return plain.flat(plain.model)


def metrics() -> list[float]:
    plain = Plain()
    batches = plain.batches()
    for _, numbers, _ in batches:
        with torch.no_grad():
            right = plain.model(plain.x[numbers]).argmax(1) == plain.y[numbers]
        plain.update(numbers)
    return [float(right.sum()), plain.losses[-1]]


def evaluated() -> list[float]:
    plain = Plain()
    with torch.no_grad():
        right = (plain.model(plain.test[0]).argmax(1) == plain.test[1]).sum().item()
    return [right / 50, plain.test_loss()]


def predicted() -> list[float]:
    plain = Plain()
    with torch.no_grad():
        return [*plain.model(plain.test[0]).flatten().tolist(), *plain.test[1].double().tolist()]


def stopped_early() -> list[float]:
    plain, best, bad, made = Plain(), float("inf"), 0, 0
    for _, numbers, ends in plain.batches():
        plain.update(numbers)
        made += 1
        if ends:
            loss = plain.test_loss()
            bad, best = (0 if loss < 0.9 * best else bad + 1), min(best, loss)
            if bad >= 2:
                break
    assert made < 20, "it did stop early"
    return [*plain.flat(plain.model), best, bad]


def logged() -> list[float]:
    plain = Plain()
    for _, numbers, _ in plain.batches():
        plain.update(numbers)
    return plain.losses


def two_players() -> list[float]:
    plain = Plain()
    g, d = plain.names["Generator"](), plain.names["Discriminator"]()
    real, z = plain.names["pairs"].tensors
    for _, numbers, _ in plain.batches():
        fake = g(z[numbers])
        losses = plain.names["d_loss"](d, real[numbers], fake.detach()), plain.names["g_loss"](d, fake)
        found = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (d, g), strict=True)]
        with torch.no_grad():
            for model, grads in zip((d, g), found, strict=True):
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.sub_(0.1 * grad)
    return plain.flat(g, d)


@dataclass(frozen=True)
class Case:
    expected: Callable[[], list[float]] | None = trained
    """None: workers agree with one another, and that is all that is promised."""
    shown: str = "flat(model)"
    like_alone: bool = True


SCORES = "[*scores.flatten().tolist(), *truth.double().tolist()]"
CASES = {
    "accelerate-import": Case(None),
    "loop": Case(),
    "ddp": Case(),
    "accumulation": Case(),
    "sampler": Case(),
    "sampler-left-in": Case(),
    "accelerate": Case(lambda: scheduled(fading, None, alike=True, clip=True)),
    "lightning": Case(lambda: scheduled(None, halved, clip=True)),
    "horovod": Case(),
    "horovod-elastic": Case(),
    "own-epochs": Case(),
    "tokens": Case(of_tokens),
    "clipping": Case(lambda: trained(on_gradient=clipped)),
    "own-gradients": Case(lambda: trained(on_gradient=clamped)),
    "amp": Case(lambda: trained(on_gradient=clipped)),
    "schedules": Case(lambda: scheduled(warm, halved)),
    "one-cycle": Case(lambda: scheduled(one_cycle, None, alike=True)),
    "averages": Case(averages, "flat(ema, swa)"),
    "metrics": Case(metrics, "[correct, loss]"),
    "evaluate": Case(evaluated, "[accuracy, mean]"),
    "predict": Case(predicted, SCORES),
    "resume": Case(),
    "start-epoch": Case(),
    "all-loops": Case(lambda: scheduled(None, halved)),
    "early-stop": Case(stopped_early, "[*flat(model), fleet.state.best, fleet.state.bad]"),
    "any": Case(lambda: trained(7)),
    "barrier": Case(),
    "logging": Case(logged, "[value for name, value, step in writer.told]"),
    "seeds": Case(None),
    "batch-norm": Case(None, "[*flat(normed), *normed[0].running_mean.tolist()]", like_alone=False),
    "gan": Case(two_players, "flat(generator, discriminator)"),
    "stream": Case(lambda: trained(epochs=1, shuffle=False)),
    "launch": Case(),
}


def test_every_block_of_the_page_is_run() -> None:
    assert len(NAMED) == len(BLOCKS), "no name twice, and no block without one"
    assert set(NAMED) == set(CASES)
    assert {block.place for block in BLOCKS} == {"import", "script", "frame", "step", "again", "elastic", "launch"}
    for block in BLOCKS:
        ast.parse(block.side("+"))


def test_the_calls_that_its_tables_name_are_in_blocks_that_are_run() -> None:
    call = re.compile(r"\b(?:fleet|step|paceline)\.\w+")
    named = set(call.findall("\n".join(re.findall(r"^\|.*$", PAGE, re.MULTILINE))))
    run = set(call.findall("\n".join(block.side("+") for block in BLOCKS)))
    assert len(named) > 20
    assert not named - run


def test_the_class_that_an_import_brings_is_a_subclass_of_the_one_that_it_replaces() -> None:
    pytest.importorskip("accelerate", reason="needs pip install 'paceline[accelerate]'")
    here: dict[str, Any] = {}
    there: dict[str, Any] = {}
    exec(NAMED["accelerate-import"].side("+"), here)
    exec(NAMED["accelerate-import"].side("-"), there)
    assert issubclass(here["Accelerator"], there["Accelerator"])
    assert here["Accelerator"] is not there["Accelerator"]


def names_of(*places: str) -> list[str]:
    return [block.name for block in BLOCKS if block.place in places]


def told_by(folder: Path, name: str, *, workers: int, script: str | None = None) -> list[Any]:
    text = (script or NAMED[name].script()) + f"\nresult = {CASES[name].shown}\n"
    return results(folder, text, workers=workers, before=BEFORE + DATA, CHECKPOINT=str(folder.parent / "saved"))


def check(name: str, *told: list[float]) -> None:
    expected = CASES[name].expected
    right = expected() if expected is not None else told[0]
    for one in told:
        assert apart(one, right) < 1e-9


@pytest.mark.parametrize("name", names_of("script", "frame", "step"))
def test_what_is_written_here_trains_as_one_process_of_plain_torch_does(tmp_path: Path, name: str) -> None:
    two = told_by(tmp_path / "two" / "run", name, workers=2)
    assert two[1] == ([] if name == "logging" else two[0]), "only the leader writes figures"
    alone = told_by(tmp_path / "one" / "run", name, workers=1)
    check(name, two[0], *(alone if CASES[name].like_alone else []))


@pytest.mark.parametrize("name", names_of("again"))
def test_what_is_saved_here_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    """Two of five epochs by two workers, the rest by two and, from the same checkpoint, by one alone."""
    whole = NAMED[name].script()
    short = re.sub(r"epochs=5|(?<=range\()5|(?<=first, )5", lambda found: found[0].replace("5", "2"), whole)
    assert short != whole
    told_by(tmp_path / "first", name, workers=2, script=short)
    kept = (tmp_path / "saved").read_bytes()
    two = told_by(tmp_path / "then", name, workers=2)
    (tmp_path / "saved").write_bytes(kept)
    (alone,) = told_by(tmp_path / "alone", name, workers=1)
    assert two[0] == two[1]
    check(name, two[0], alone)


@pytest.mark.parametrize("name", names_of("elastic"))
def test_the_same_where_workers_may_come_and_go(tmp_path: Path, name: str) -> None:
    text = NAMED[name].script() + f"\nresult = {CASES[name].shown}\n"
    with elastic(tmp_path, text, before=BEFORE + DATA, env={"CHECKPOINT": ""}) as fleet:
        ended = fleet.wait()
    assert [one.code for one in ended.values()] == [0, 0], [one.err[-2000:] for one in ended.values()]
    assert ended[0].value == ended[1].value
    check(name, ended[0].value)


LAUNCHED = """
def train(rate):
    with paceline.join("equal", quiet=True) as fleet:
        model = fleet.model(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(dataset, global_batch=64, micro_batch=16, epochs=5):
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            step.commit(optimizer)
        return flat(model)
"""


def test_a_function_of_a_notebook_is_launched_as_a_fleet(tmp_path: Path) -> None:
    script = BEFORE + DATA + LAUNCHED + NAMED["launch"].side("+") + "\nimport json\nprint(json.dumps(weights))\n"
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        cwd=tmp_path,
        env={**os.environ, "CHECKPOINT": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()  # the Gloo of torch 2.9 and 2.10 prints lines of its own before it
    check("launch", json.loads(last))


# -- the page's tables of what is refused ----------------------------------------------------------------------------

REFUSED = {
    found[0]: re.findall(r"^\| `(.+?)` \| (.*) \|$", found[1], re.MULTILINE)
    for found in re.findall(
        r"^\*(In the micro-batch|In the step|Before the loop)\*.*?:\n\n(.*?)\n\n", PAGE, re.M | re.S
    )
}
LEFT_IN = """
loader = DataLoader(dataset, 16)
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
fleet.track(scheduler=scheduler)
lbfgs = torch.optim.LBFGS(model.parameters())
BEFORE_THE_LOOP
for step in fleet.steps(loader, global_batch=64, epochs=5):
    for x, y in step:
        loss = loss_fn(model(x), y)
        IN_THE_MICRO_BATCH
    IN_THE_STEP
"""
RIGHT = {
    "Before the loop": "pass",
    "In the micro-batch": "step.backward(loss)",
    "In the step": "step.commit(optimizer)",
}
DEFAULT_GROUP = """
torch.distributed.init_process_group(
    "gloo",
    init_method="file://" + os.environ["CHECKPOINT"],
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
"""


@pytest.mark.parametrize(
    ("place", "line", "words"),
    [pytest.param(place, *row, id=row[0]) for place, rows in REFUSED.items() for row in rows],
)
def test_what_is_left_in_is_refused_in_the_words_of_the_page(tmp_path: Path, place: str, line: str, words: str) -> None:
    text = LEFT_IN
    for where, right in RIGHT.items():
        text = text.replace(where.upper().replace(" ", "_").replace("-", "_"), line if where == place else right)
    before = BEFORE + DATA + (DEFAULT_GROUP if "DistributedDataParallel" in line else "")
    said = refusals(tmp_path, framed(text), before=before, CHECKPOINT=str(tmp_path / "saved"))
    assert words in said


def test_the_tables_of_what_is_refused_are_found() -> None:
    assert [len(rows) for rows in REFUSED.values()] == [6, 5, 4]
