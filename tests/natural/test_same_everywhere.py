"""What only some workers load, freeze or put into evaluation mode is refused before its step counts, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import outcomes, refusals, results

pytestmark = pytest.mark.fleet

ONE_AFTER_ANOTHER = """
from copy import deepcopy

said = []

def begin(steps=1):
    before = flat(model)
    try:
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            steps -= 1
            if not steps:
                break
    except (paceline.MisuseError, ValueError) as error:
        said.append([str(error), flat(model) == before])
    else:
        said.append(["", False])

with paceline.join() as fleet:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model = fleet.model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if fleet.is_leader:  # as by loading it from a file that the leader has
        optimizer.load_state_dict(torch.load("adam.pt") if os.path.exists("adam.pt") else stepped(model))
    fleet.track(optimizer=optimizer)
    ema = torch.optim.swa_utils.AveragedModel(model)
    fleet.track(ema=ema)
    given = float(optimizer.state[model[0].weight]["exp_avg"].sum())

    saved = deepcopy(model.state_dict())
    if fleet.is_leader:
        model.load_state_dict({name: 1.5 * value for name, value in saved.items()})
    begin()
    model.load_state_dict(saved)

    saved = deepcopy(optimizer.state_dict())
    if fleet.is_leader:
        optimizer.load_state_dict(stepped(model))
    begin()
    optimizer.load_state_dict(saved)

    if fleet.rank == 1:
        ema.module[2].weight.data.add_(0.1)
    begin()
    ema.load_state_dict({"n_averaged": torch.tensor(0), **{f"module.{k}": v for k, v in model.state_dict().items()}})

    if fleet.rank == 1:
        model[1].eval()
    begin()
    model.train()

    if fleet.rank == 1:
        model[0].weight.requires_grad_(False)
    begin()
    model.requires_grad_(True)

    if fleet.is_leader:
        model(data[:6][0])  # moves batch norm's statistics on the leader alone
    begin(steps=2)
    if fleet.rank == 1:
        with torch.no_grad():
            model[2].bias.add_(1.0)
    result = {"said": said, "weights": flat(model), "given": given}
"""
STEPPED = """
def stepped(model):
    other = deepcopy(model)
    adam = torch.optim.Adam(other.parameters(), lr=0.01)
    other(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    adam.step()
    return adam.state_dict()
"""


def test_what_differs_before_the_first_step_is_named_and_nothing_was_updated(tmp_path: Path) -> None:
    text = ONE_AFTER_ANOTHER.replace("said = []\n", "said = []\n" + STEPPED, 1)
    one, other = results(tmp_path, text)
    assert one["given"] == other["given"] != 0, "fleet.track gives every worker the leader's state"
    weights, adam, ema, mode, frozen, buffers = one["said"]
    assert [untouched for _, untouched in one["said"]] == [True] * 5 + [False]
    assert "before the first step worker 1 does not hold what worker 0 does: parameter 0.weight and " in weights[0]
    assert "before fleet.model(...), which gives every worker the leader's" in weights[0]
    assert "worker 0 does: optimizer: exp_avg of its parameter 0 and " in adam[0] or "optimizer: step" in adam[0]
    assert "before fleet.track(optimizer=...), which gives every worker the leader's" in adam[0]
    assert "worker 1 does not hold what worker 0 does: ema: module.2.weight" in ema[0]
    assert "the module 1 trains on worker 0 and evaluates on worker 1" in mode[0]
    assert "the frozen parameters (requires_grad) is [] on worker 0 and ['0.weight'] on worker 1" in frozen[0]
    assert buffers[0] == "", "buffers are made the leader's"
    assert other["said"] == one["said"]


def test_averages_begin_with_the_same_weights_too(tmp_path: Path) -> None:
    text = """
    with paceline.join(combine=paceline.Averaging(every_steps=2)) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fleet.rank:
            model[2].bias.data.add_(1.0)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
    """
    for ended in outcomes(tmp_path, text):
        assert "before the first step worker 1 does not hold what worker 0 does: parameter 2.bias" in ended.err


def test_an_average_of_weights_that_the_leader_alone_updates_is_refused(tmp_path: Path) -> None:
    text = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ema = torch.optim.swa_utils.AveragedModel(model)
        fleet.track(optimizer=optimizer, ema=ema)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            if fleet.is_leader:
                ema.update_parameters(model)
    """
    for ended in outcomes(tmp_path, text):
        assert "in step 1 worker 1 does not hold what worker 0 does: ema: n_averaged" in ended.err
        assert "must be loaded and updated on every worker alike" in ended.err


NOT_TRAINABLE = """
class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

said = []

def tried(call):
    try:
        call()
    except (paceline.MisuseError, ValueError) as error:
        said.append(str(error))

def train(hook=None):
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for a, b in step:
            step.backward(loss_fn(model(a.to(model[0].weight.dtype)), b))
        step.commit(optimizer)
        if hook is None and step.index == 1:
            model.float()

def update(parameter):
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None

with paceline.join() as fleet:
    tried(lambda: fleet.model(Wave()))
    tried(lambda: fleet.model(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))))
    tried(lambda: fleet.model(nn.LazyLinear(3)))
    tried(lambda: fleet.model(network(), buffers="leader"))
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tried(train)
    model.double()
    model[0].weight.register_post_accumulate_grad_hook(update)
    tried(lambda: train(hook=update))
    result = said
"""


def test_what_cannot_be_trained_is_refused_in_a_sentence(tmp_path: Path) -> None:
    one, other = results(tmp_path, NOT_TRAINABLE)
    assert one == other
    wave, embedding, lazy, option, converted, hook = one
    assert "parameter phase is torch.complex64" in wave
    assert "torch.view_as_real" in wave
    assert "the embedding 0 has sparse=True" in embedding
    assert "run one batch through the model before fleet.model" in lazy
    assert 'buffers must be "shared" or "own"' in option
    assert "changed from torch.float64 on cpu to torch.float32 on cpu while training (model.float()" in converted
    assert "register_post_accumulate_grad_hook) set its gradient to None during backward" in hook


TEACHER = """
class Holder:
    pass

def main(said):
    with paceline.join() as fleet:
        student = fleet.model(network())
        torch.manual_seed(40 + fleet.rank)  # as without a seed
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        unused, holder, models = nn.Linear(4, 8), Holder(), {"small": nn.Linear(2, 2)}
        holder.teacher = nn.Sequential(nn.Linear(4, 3)).double().eval()

        def train():
            for step in fleet.steps(data, global_batch=12, micro_batch=3):
                for a, b in step:
                    with torch.no_grad():
                        target = holder.teacher(a)
                    step.backward(nn.functional.mse_loss(student(a), target))
                step.commit(optimizer)

        try:
            train()
        except paceline.MisuseError as error:
            said.append(str(error))
        fleet.track(teacher=holder.teacher)
        train()
        return flat(student, holder.teacher)

said = []
weights = main(said)
result = {"said": said, "weights": weights}
"""


def test_a_teacher_of_unlike_weights_is_refused_by_its_name_when_a_step_uses_it(tmp_path: Path) -> None:
    one, other = results(tmp_path, TEACHER)
    assert one == other
    (said,) = one["said"]
    assert "step 0 uses holder.teacher (Sequential), which holds other weights" in said
    assert "fleet.track(teacher=holder.teacher)" in said


def test_layers_in_another_order_are_refused_by_the_first_that_has_another_place(tmp_path: Path) -> None:
    script = """
    tasks = ["age", "price", "rooms"]
    if int(os.environ["RANK"]) == 1:  # as a set of names has them in another process
        tasks = ["age", "rooms", "price"]
    with paceline.join() as fleet:
        model = fleet.model(nn.ModuleDict({task: nn.Linear(4, 3) for task in tasks}))
    """
    said = refusals(tmp_path, script)
    assert "another order on worker 1, where rooms.weight stands in the place of worker 0's price.weight" in said
    assert "sorted(...)" in said
