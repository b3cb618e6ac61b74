"""Buffers that forward changes: after every round they are one worker's everywhere, as in DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import back_after_a_kill, outcomes, refusals, results

pytestmark = pytest.mark.fleet

MODEL = """
import time
from torch.nn.utils.parametrizations import spectral_norm

class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("bank", torch.zeros(16, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("ready", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.register_buffer("constant", torch.arange(7.0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, a):
        out = self.net(a)
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.centre = 0.9 * self.centre + 0.1 * out.mean(0)  # another tensor
                at = int(self.place)
                self.bank[at : at + 1] = out[:1]  # in place
                self.place.fill_((at + 1) % 16)
                self.ready[at % 5] = True
                self.cache = torch.zeros(self.calls)  # a cache of each worker's own
        return out - self.centre

def remembered(model):
    return [[name, tensor.tolist()] for name, tensor in model.named_buffers() if name != "cache"]
"""

TRAIN = """
PLACE = Path(os.environ["PACELINE_RUN_DIR"]).parent
with paceline.join(COMBINE) as fleet:
    torch.manual_seed(7 + fleet.rank)
    model = fleet.model(Remembers().double() MORE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fleet.track(optimizer=optimizer)
    own, after = [], []
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=EPOCHS, drop_last=True):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        own.append(remembered(model))
        step.commit(optimizer)
        after.append(remembered(model))
        SLEEP
    result = {"after": after[-12:], "own": own[-12:], "weights": flat(model)}
"""
SLOWLY = """if not (PLACE / "hurry").exists():
            time.sleep(0.01)"""


def script(*, combine: str = "", more: str = "", epochs: int = 3, sleep: str = "pass") -> str:
    text = TRAIN.replace("COMBINE", combine).replace("MORE", more).replace("EPOCHS", str(epochs))
    return "from pathlib import Path\n" + MODEL + text.replace("SLEEP", sleep)


def without_batch_norm(buffers: list[tuple[str, list[float]]]) -> list[tuple[str, list[float]]]:
    return [(name, value) for name, value in buffers if not name.startswith("net.1.")]


def test_every_step_leaves_all_workers_with_the_leaders_buffers(tmp_path: Path) -> None:
    one, other = results(tmp_path, script(), PACELINE_PACE="fixed:1,3")
    assert one["weights"] == other["weights"]
    assert one["after"] == other["after"], "buffers of all kinds, batch norm's too"
    for own, after in zip(one["own"], one["after"], strict=True):
        assert without_batch_norm(own) == without_batch_norm(after), "the leader's are its own"
    assert without_batch_norm(other["own"][-1]) != without_batch_norm(one["own"][-1])
    assert {name for name, _ in one["after"][0]} >= {"centre", "bank", "ready", "net.0.parametrizations.weight.0._u"}


def test_with_own_buffers_each_worker_keeps_what_its_samples_left(tmp_path: Path) -> None:
    one, other = results(tmp_path, script(more=', buffers="own"'))
    assert [without_batch_norm(own) for own in other["own"]] == [without_batch_norm(now) for now in other["after"]]
    assert without_batch_norm(one["after"][-1]) != without_batch_norm(other["after"][-1])


def test_under_deadlines_with_a_leader_that_is_late_too(tmp_path: Path) -> None:
    late = "(time.sleep(0.3) if fleet.rank == 0 and step.index in (4, 9) else None)\n            step.backward("
    text = script(combine="Deadline(0.05)", epochs=6).replace("step.backward(", late)
    text = text.replace("step.commit(optimizer)", "step.commit(optimizer)\n        behind.append(step.record.behind)")
    text = text.replace("own, after =", "behind, own, after = [],").replace('"own": ', '"behind": behind, "own": ')
    one, other = results(tmp_path, "from deadline_cases import Deadline\n" + text, PACELINE_PACE="")
    assert max(map(max, filter(None, one["behind"]))) >= 2, "the leader missed whole rounds"
    assert one["after"] == other["after"]
    assert one["weights"] == other["weights"]


def test_averages_share_them_in_every_round(tmp_path: Path) -> None:
    combine = "combine=paceline.Averaging(every_steps=2)"
    one, other = results(tmp_path, script(combine=combine))
    assert one["after"][-1] == other["after"][-1]


def test_a_worker_that_returns_has_them_and_the_fleet_goes_on_with_them(tmp_path: Path) -> None:
    one, other = back_after_a_kill(tmp_path, script(epochs=60, sleep=SLOWLY), at_step=9)
    assert one["after"] == other["after"]
    assert one["weights"] == other["weights"]


def test_one_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    text = script().replace(
        "self.centre = 0.9", "self.bank = self.bank.repeat(2, 1)\n                self.centre = 0.9"
    )
    said = refusals(tmp_path, text)
    assert "the buffer bank changed from [16, 3] torch.float64 to [" in said
    assert 'fleet.model(..., buffers="own")' in said


SET = """
from torch.nn.utils import prune
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.seen = network(), []
        self.register_buffer("centre", FIRST)
        self.register_buffer("cache", None, persistent=False)
    def forward(self, a):
        out = self.net(a)
        self.cache = a
        INSIDE
        return out - (0.0 if self.centre is None else self.centre)

with paceline.join() as fleet:
    model = fleet.model(Centred())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if step.ends_epoch:
            BEHIND
    result = "trained"
"""
KEPT, ZEROS = "self.seen.append(out.detach())", "torch.zeros(3, dtype=torch.float64)"


@pytest.mark.parametrize(
    ("first", "inside", "behind", "said"),
    [
        ("None", "if self.centre is None: self.centre = out.detach().mean(0)", "pass", "the buffer centre was None"),
        (ZEROS, KEPT, "model.centre = torch.cat(model.seen).mean(0)", "the buffer centre was set between two steps"),
        (ZEROS, KEPT, "model.centre = torch.full((3,), step.loss).double()", ""),
        (ZEROS, KEPT, "fleet.evaluate(lambda a, b: model(a).mean(1), data)", ""),
        ("None", KEPT, "prune.l1_unstructured(model.net[0], 'weight', amount=0.3)", ""),
        ("None", KEPT, "model.centre = torch.cat(model.seen).mean(0)", "the buffer centre was None"),
    ],
    ids=[
        "None at first",
        "from what each has seen",
        "from the step's loss",
        "not at all",
        "pruned alike",
        "None at first, from what each has seen",
    ],
)
def test_a_buffer_that_workers_set_each_for_itself_is_warned_of(
    tmp_path: Path, first: str, inside: str, behind: str, said: str
) -> None:
    script = SET.replace("FIRST", first).replace("INSIDE", inside).replace("BEHIND", behind)
    ended = outcomes(tmp_path, script)
    assert [one.value for one in ended] == ["trained"] * 2, [one.err[-2000:] for one in ended]
    told = [line for line in ended[0].err.splitlines() if "the buffer" in line]
    assert len(told) == bool(said), ended[0].err
    assert said in "".join(told)
