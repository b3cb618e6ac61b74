"""Updates happen in one place: whatever a script does beside it is refused in that step, before a parameter changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import BEFORE, apart, refusals, results

pytestmark = pytest.mark.fleet

WAYS = """
from paceline.errors import PacelineError

clip = nn.utils.clip_grad_norm_

def tried(update, inside="pass", optimizer="torch.optim.SGD(model.parameters(), lr=0.1)", **joined):
    '''The weights after four steps with this update, or what was said.'''
    names = dict(globals())
    try:
        with paceline.join(**joined) as fleet:
            model = names["model"] = fleet.model(network())
            names["fleet"], names["optimizer"] = fleet, eval(optimizer, names)
            for step in fleet.steps(data, global_batch=12, micro_batch=3, shuffle=False):
                names["step"] = step
                for a, b in step:
                    step.backward(loss_fn(model(a), b))
                    exec(inside, names)
                exec(update, names)
    except (ValueError, PacelineError) as error:
        return [type(error).__name__, str(error)]
    return flat(model)

result = {name: tried(**way) for name, way in args.items()}
"""


def tried(folder: Path, before: str = "", **ways: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two workers had at the end of each way, one after another in one process."""
    first, second = results(folder, WAYS.replace("args", repr(ways)), before=BEFORE + before)
    return first, second


RIGHT: dict[str, dict[str, Any]] = {
    "commit": {"update": "step.commit(optimizer)"},
    "own": {"update": "step.reduce(); optimizer.step(); step.commit()"},
    "own, cleared behind": {"update": "step.reduce(); optimizer.step(); optimizer.zero_grad(); step.commit()"},
    "by hand": {"update": "step.reduce()\nfor p in model.parameters(): p.data.sub_(0.1 * p.grad)\nstep.commit()"},
    "subclass": {"update": "step.commit(optimizer)", "optimizer": "Quiet(model.parameters(), lr=0.1)"},
    "wrapped": {"update": "step.commit(optimizer)", "optimizer": "Around(model.parameters(), lr=0.1)"},
    "wrapped, own": {
        "update": "step.reduce(); optimizer.step(); step.commit()",
        "optimizer": "Around(model.parameters(), lr=0.1)",
    },
    "two halves": {
        "update": "step.reduce(); optimizer[0].step(); step.commit(optimizer[1])",
        "optimizer": "[torch.optim.SGD(part, lr=0.1) for part in split(model)]",
    },
    "a stranger beside": {
        "update": "step.commit(optimizer); stranger.step(); stranger.step()",
        "inside": "stranger.step()",
    },
    "a first step left out": {"update": "step.reduce()\nif step.index: optimizer.step()\nstep.commit()"},
}

KINDS = """
class Quiet(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

class Around(torch.optim.Optimizer):
    '''One that calls another's step twice in its own.'''
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr=lr / 2)
    def step(self, closure=None):
        self.inner.step()
        self.inner.step()

def split(model):
    own = list(model.parameters())
    return own[:2], own[2:]

alone = nn.Linear(2, 2)
alone.weight.grad = torch.ones_like(alone.weight)
stranger = torch.optim.SGD(alone.parameters(), lr=0.1)
"""


def test_one_update_a_step_is_right_however_it_is_written(tmp_path: Path) -> None:
    first, second = tried(tmp_path, KINDS, **RIGHT)
    assert first == second
    expected = first["commit"]
    assert isinstance(expected[0], float)
    for name in RIGHT:
        assert isinstance(first[name][0], float), (name, first[name])
        if name != "a first step left out":
            assert apart(first[name], expected) < 1e-12, name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "own, and again in commit": (
        {"update": "step.reduce()\nclip(model.parameters(), 1.0)\noptimizer.step()\nstep.commit(optimizer)"},
        "step.commit(optimizer) of step 0 would make a second update: SGD has stepped already",
    ),
    "twice": (
        {"update": "step.reduce(); optimizer.step(); optimizer.step(); step.commit()"},
        "SGD stepped twice in step 0",
    ),
    "left behind the commit": (
        {"update": "step.commit(optimizer); optimizer.step(); optimizer.zero_grad()"},
        "SGD stepped after the commit of step 0",
    ),
    "in the inner loop": (
        {"update": "step.commit(optimizer)", "inside": "optimizer.step()"},
        "SGD stepped in the middle of step 0",
    ),
    "never": (
        {"update": "step.reduce(); step.commit()"},
        "step 1 and the one before ended without an update: no optimizer",
    ),
    "cleared": (
        {"update": "step.reduce(); optimizer.zero_grad(); step.commit(optimizer)"},
        "without an update: the gradients were cleared",
    ),
    "zeroed": (
        {"update": "step.reduce(); optimizer.zero_grad(set_to_none=False); optimizer.step(); step.commit()"},
        "without an update: the gradients were cleared",
    ),
    "a closure": (
        {
            "update": "step.reduce(); optimizer.step(lambda: 0.0); step.commit()",
            "optimizer": "torch.optim.LBFGS(model.parameters())",
        },
        "LBFGS evaluates the whole batch several times",
    ),
    "on the leader alone": (
        {"update": "step.reduce()\nif fleet.is_leader or not step.index: optimizer.step()\nstep.commit()"},
        "unlike numbers of updates in step 1: worker 0 made 1, worker 1 made 0",
    ),
    "averages, left behind the commit": (
        {"update": "step.commit(optimizer); optimizer.step()", "combine": "average"},
        "SGD stepped after the commit of step 0",
    ),
}


def test_every_other_update_is_refused_in_its_step(tmp_path: Path) -> None:
    first, second = tried(tmp_path, **{name: way for name, (way, _) in WRONG.items()})
    for name, (_, said) in WRONG.items():
        for told in (first[name], second[name]):
            assert isinstance(told[0], str), f"{name} was not refused"
        assert any(said in told[1] for told in (first[name], second[name])), (name, first[name], second[name])


CENTRES = """
class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    def forward(self, out, labels):
        return (out - self.centres[labels]).square().sum(1).mean()

with paceline.join() as fleet:
    model, criterion = fleet.model(network()), Centres()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.Adam(criterion.parameters(), lr=0.1)
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for a, b in step:
            out = model(a)
            step.backward(loss_fn(out, b) + 0.1 * CENTRE_LOSS)
        UPDATE
    result = {"weights": flat(model)}
"""


@pytest.mark.parametrize(
    "update",
    [
        "step.commit(optimizer); own.step(); own.zero_grad()",
        "step.reduce(); optimizer.step(); own.step(); step.commit(); own.zero_grad(set_to_none=False)",
    ],
    ids=["behind the commit", "before it"],
)
def test_an_optimizer_of_parameters_that_the_fleet_was_not_given_is_refused_where_the_loss_reaches_them(
    tmp_path: Path, update: str
) -> None:
    script = CENTRES.replace("CENTRE_LOSS", "criterion(out, b)").replace("UPDATE", update)
    assert "Adam steps in the loop and holds a parameter of shape [3, 3] that the loss reaches" in refusals(
        tmp_path, script
    )


def test_an_optimizer_of_other_parameters_may_step_in_the_loop_where_no_loss_of_the_fleet_reaches_them(
    tmp_path: Path,
) -> None:
    update = "step.commit(optimizer); criterion(out.detach(), b).backward(); own.step(); own.zero_grad()"
    script = CENTRES.replace("CENTRE_LOSS", "out.square().mean()").replace("UPDATE", update)
    first, second = results(tmp_path, script)
    assert first == second


CLIPPED = """
from torch.func import functional_call, grad, vmap

def of_one(weights, a, b):
    return loss_fn(functional_call(model, weights, a[None]), b[None])

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in fleet.steps(data, global_batch=12, micro_batch=SIZE):
        for a, b in step:
            weights = {name: p.detach() for name, p in model.named_parameters()}
            each = vmap(grad(of_one), (None, 0, 0))(weights, a, b)
            norm = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
            clipped = {name: torch.einsum("n,n...->...", 1 / norm.clamp(min=1), g) for name, g in each.items()}
            GIVE
        step.commit(optimizer)
    result = flat(model)
"""


def test_a_gradient_that_the_script_makes_itself_is_given_as_a_loss(tmp_path: Path) -> None:
    """Clipped for each sample, as for differential privacy."""
    by_hand = "for name, p in model.named_parameters(): p.grad = clipped[name] / len(a)"
    said = refusals(tmp_path / "by_hand", CLIPPED.replace("GIVE", by_hand).replace("SIZE", "3"))
    assert "is given as a loss, the sum over the parameters of (p * g).sum()" in said
    given = CLIPPED.replace(
        "GIVE",
        "total = sum((p * clipped[name]).sum() for name, p in model.named_parameters())\n"
        "            step.backward(total / len(a), weight=len(a))",
    )
    one = results(tmp_path / "one", given.replace("SIZE", "12"), workers=1)[0]
    for two in results(tmp_path / "two", given.replace("SIZE", "3"), PACELINE_PACE="fixed:1,3"):
        assert apart(two, one) < 1e-12
