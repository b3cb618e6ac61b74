"""Scalers and optimisers of every kind, as people bring them along: right, or refused with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import BEFORE, apart, outcomes, refusals, results

pytestmark = pytest.mark.fleet

TRAINING = """
with paceline.join(PACE) as fleet:
    model = fleet.model(network())
    optimizer = OPTIMIZER
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for x, y in step:
            BACKWARD
        step.commit(optimizer)
    result = flat(model)
"""

BOUNDED = (
    f"\nimport sys\nsys.path.insert(0, {str(Path(__file__).parents[1] / 'fleet')!r})\n"
    "from deadline_cases import Deadline\n"
)


def script(
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)",
    backward: str = "step.backward(loss_fn(model(x), y))",
    pace: str = "",
) -> str:
    return TRAINING.replace("OPTIMIZER", optimizer).replace("BACKWARD", backward).replace("PACE", pace)


@pytest.mark.parametrize(
    ("backward", "pace"),
    [
        ("step.backward(scaler.scale(loss_fn(model(x), y)))", ""),
        ("step.backward(scaler.scale(loss_fn(model(x), y)) / 4 + 0 * sum(p.sum() for p in model.parameters()))", ""),
        ("step.backward(scaler.scale(loss_fn(model(x), y)))", "Deadline(None, wait_for=2)"),
    ],
)
def test_a_scale_left_in_the_loss_is_refused(tmp_path: Path, backward: str, pace: str) -> None:
    before = BEFORE + BOUNDED + '\nscaler = torch.amp.GradScaler("cpu")\n'
    said = refusals(tmp_path, script(backward=backward, pace=pace), before=before, PACELINE_PACE="")
    assert "the loss was multiplied by a GradScaler's scale, 65536" in said
    assert "fleet.track(scaler=scaler)" in said


def test_a_factor_of_ones_own_and_a_scaler_that_is_off_are_no_scale(tmp_path: Path) -> None:
    """Nor is a number in a tensor that is as large as a scale."""
    scaler = '\nscaler = torch.amp.GradScaler("cpu", enabled=False)\nother = torch.amp.GradScaler("cpu")\n'
    scaler += "other.scale(torch.ones(1))\nlarge = torch.tensor(65536.0)\n"
    loss = "step.backward(scaler.scale(loss_fn(model(x), y)) * large / 65536)"
    told = results(tmp_path / "a", script(backward=loss), before=BEFORE + scaler)
    assert apart(told[0], results(tmp_path / "b", script())[0]) < 1e-12


HOOKS = """
def hooked(model):
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    def update(p):
        each[p].step()
        each[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return torch.optim.SGD(model.parameters(), lr=0.0)
"""


@pytest.mark.parametrize("pace", ["", "Deadline(None, wait_for=2)"])
def test_an_optimiser_that_steps_during_backward_is_refused_by_what_it_is(tmp_path: Path, pace: str) -> None:
    text = script("hooked(model)", pace=pace)
    said = refusals(tmp_path, text, before=BEFORE + BOUNDED + HOOKS, PACELINE_PACE="")
    assert "an optimiser that steps in register_post_accumulate_grad_hook" in said
    assert "AssertionError" not in said


def test_an_optimiser_whose_step_needs_a_closure_is_refused_by_name(tmp_path: Path) -> None:
    said = refusals(tmp_path, script("torch.optim.LBFGS(model.parameters())"))
    assert "LBFGS evaluates the whole batch several times an update" in said
    assert "TypeError" not in said


SAM = """
class SAM(torch.optim.Optimizer):
    '''Sharpness-aware minimisation, with the two calls that people know.'''

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def all(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.all()]).norm()
        for p in self.all():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def second_step(self):
        for p in self.all():
            p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure=None):
        raise RuntimeError("SAM needs a closure")

def twice(epoch):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    whole = order[: len(order) // 12 * 12].reshape(-1, 12)
    return whole.repeat_interleave(2, dim=0).flatten().tolist()
"""

SHARP = """
with paceline.join() as fleet:
    model = fleet.model(network())
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    fleet.track(sam=sam, base=sam.base)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2, order=twice):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.reduce()
        sam.first_step() if step.index % 2 == 0 else sam.second_step()
        step.commit()
    result = flat(model)
"""


def test_sam_takes_two_steps_on_the_same_batch_and_is_exact(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(BEFORE + SAM, names)
    model, (x, y) = names["network"](), names["data"].tensors
    sam = names["SAM"](model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for epoch in range(2):
        for number, indices in enumerate(torch.tensor(names["twice"](epoch)).split(12)):
            model.zero_grad()
            names["loss_fn"](model(x[indices]), y[indices]).backward()
            sam.first_step() if number % 2 == 0 else sam.second_step()
    told = results(tmp_path, SHARP, before=BEFORE + SAM)
    assert told[0] == told[1]
    assert apart(told[0], names["flat"](model)) < 1e-12


def test_sam_given_to_commit_is_refused_with_the_way_to_write_it(tmp_path: Path) -> None:
    text = script("SAM(model.parameters(), torch.optim.SGD, lr=0.1)")
    assert "SAM takes two gradients of one batch for an update" in refusals(tmp_path, text, before=BEFORE + SAM)


CLAMPED = """
with paceline.join() as fleet:
    model = fleet.model(network())
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        step.commit(optimizer)
"""


def test_hooks_that_see_parts_of_the_gradient_are_warned_of_once(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, CLAMPED)
    assert [outcome.code for outcome in ended] == [0, 0]
    assert ended[0].err.count("parameter 0.weight and 3 more has hooks on its gradient") == 1
    assert "hooks" not in ended[1].err, "the leader's words are enough"
    assert "has hooks" not in outcomes(tmp_path / "none", script())[0].err


TEMPERATURE = """
with paceline.join() as fleet:
    model = fleet.model(network())
    OWN
    optimizer, other = torch.optim.Adam(model.parameters(), 0.01), torch.optim.Adam(TRAINED, 0.1)
    fleet.track(optimizer=optimizer, other=other)
    for step in fleet.steps(data, global_batch=12, micro_batch=SIZE):
        for x, y in step:
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
            step.backward((alpha.exp().detach() * each).mean() + (alpha.exp() * (each.detach() - 1)).mean())
        step.commit(optimizer, other)
    result = [*flat(model), float(alpha)]
"""


def test_a_tensor_of_ones_own_beside_the_model_is_refused_with_what_is_exact(tmp_path: Path) -> None:
    """A temperature is no parameter of a module in most scripts."""
    tensor = "torch.zeros(1, dtype=torch.float64)"
    loose = TEMPERATURE.replace("OWN", f"alpha = {tensor}.requires_grad_()").replace("TRAINED", "[alpha]")
    said = refusals(tmp_path / "loose", loose.replace("SIZE", "3"))
    assert "a tensor of shape [1] is no parameter of a module. Write own = fleet.model(nn.ParameterList([ten" in said
    own = f"own = fleet.model(nn.ParameterList([{tensor}]))\n    alpha = own[0]"
    given = TEMPERATURE.replace("OWN", own).replace("TRAINED", "own.parameters()")
    one = results(tmp_path / "one", given.replace("SIZE", "12"), workers=1)[0]
    for two in results(tmp_path / "two", given.replace("SIZE", "3"), PACELINE_PACE="fixed:1,3"):
        assert apart(two, one) < 1e-12
