"""Several models with a loss each, as a GAN has them: in one step, in steps by turns, and what would be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from programs import apart, elastic, refusals, results
from torch import nn

pytestmark = pytest.mark.fleet

BEFORE = """
import sys
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import TensorDataset
import paceline

torch.manual_seed(3)
data = TensorDataset(torch.randn(48, 4, dtype=torch.float64), torch.randn(48, 2, dtype=torch.float64))

def networks():
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    discriminator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return generator, discriminator

def d_loss(d, real, fake):
    right, wrong = d(real), d(fake.detach())
    return bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))

def g_loss(d, fake):
    judged = d(fake)
    return bce(judged, torch.ones_like(judged))

def flat(*models):
    return [value for model in models for p in model.parameters() for value in p.detach().flatten().tolist()]

def optimizers(g, d):
    return torch.optim.Adam(g.parameters(), lr=0.02), torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9)
"""

TOGETHER = """
with paceline.join() as fleet:
    g, d = (fleet.model(network) for network in networks())
    opt_g, opt_d = optimizers(g, d)
    fleet.track(opt_g=opt_g, opt_d=opt_d)
    losses = []
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=3, shuffle=False):
        for real, z in step:
            fake = g(z)
            step.backward(d_loss(d, real, fake), models=d)
            step.backward(g_loss(d, fake), models=g)
        step.commit(opt_g, opt_d)
        losses.append(step.loss)
    result = [flat(g, d), losses]
"""

BY_TURNS = """
with paceline.join() as fleet:
    g, d = (fleet.model(network) for network in networks())
    opt_g, opt_d = optimizers(g, d)
    fleet.track(opt_g=opt_g, opt_d=opt_d)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=3, shuffle=False):
        trains_d = step.index % 2 == 0
        for real, z in step:
            fake = g(z)
            step.backward(d_loss(d, real, fake) if trains_d else g_loss(d, fake)MODELS)
        step.commit(opt_d if trains_d else opt_g)
    result = flat(g, d)
"""


def plain(*, by_turns: bool) -> tuple[list[float], list[float]]:
    """The same in plain torch on one machine with whole batches: the weights, and the sum of the losses a step."""
    names: dict[str, Any] = {}
    exec(BEFORE, names)  # the same data and networks
    g, d = names["networks"]()
    opt_g, opt_d = names["optimizers"](g, d)
    losses = []
    for step in range(12):
        real, z = (part[12 * step % 48 :][:12] for part in names["data"].tensors)
        fake = g(z)
        both = names["d_loss"](d, real, fake), names["g_loss"](d, fake)
        losses.append((both[0] + both[1]).item())
        for loss, network, turn in ((both[0], d, 0), (both[1], g, 1)):
            for p, grad in zip(network.parameters(), torch.autograd.grad(loss, list(network.parameters()))):
                p.grad = None if by_turns and step % 2 != turn else grad
        for optimizer in (opt_g, opt_d):
            optimizer.step()
    return names["flat"](g, d), losses


@pytest.mark.parametrize("pace", ["equal", "fixed:1,3"])
def test_a_backward_for_each_model_gives_each_its_own_losss_gradient(tmp_path: Path, pace: str) -> None:
    weights, losses = plain(by_turns=False)
    told = results(tmp_path, TOGETHER, before=BEFORE, PACELINE_PACE=pace)
    assert told[0] == told[1]
    assert apart(told[0][0], weights) < 1e-12
    assert apart(told[0][1], losses) < 1e-12, "step.loss is the sum of the losses"


def test_the_same_in_rounds_that_close_at_a_cut_off(tmp_path: Path) -> None:
    """Such rounds count whole micro-batches; this one waits for both workers, so that all of them do."""
    script = TOGETHER.replace("paceline.join()", "paceline.join(Deadline(None, wait_for=2))")
    found = f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'fleet')!r})\nfrom deadline_cases import Deadline\n"
    told = results(tmp_path, script, before=BEFORE + found, PACELINE_PACE="")
    assert told[0] == told[1]
    assert apart(told[0][0], plain(by_turns=False)[0]) < 1e-12


def test_the_same_with_a_scaler_and_micro_batches_by_memory(tmp_path: Path) -> None:
    tracked = 'scaler = torch.amp.GradScaler("cpu")\n    fleet.track(scaler=scaler, opt_g=opt_g, opt_d=opt_d)'
    script = TOGETHER.replace("fleet.track(opt_g=opt_g, opt_d=opt_d)", tracked)
    script = script.replace("micro_batch=3", 'micro_batch="auto"')
    told = results(tmp_path, script, before=BEFORE)
    assert told[0] == told[1]
    assert apart(told[0][0], plain(by_turns=False)[0]) < 1e-12


def test_averages_of_a_worker_alone_are_plain_training_too(tmp_path: Path) -> None:
    told = results(tmp_path, TOGETHER, before=BEFORE, workers=1, PACELINE_COMBINE="average")
    assert apart(told[0][0], plain(by_turns=False)[0]) < 1e-12


@pytest.mark.parametrize("micro", ["3", '"auto"'])
def test_the_same_where_workers_may_come_and_go(tmp_path: Path, micro: str) -> None:
    """Gradients are kept apart from their sums there."""
    script = TOGETHER.replace("micro_batch=3", f"micro_batch={micro}")
    with elastic(tmp_path, script, before=BEFORE) as flock:
        ended = flock.wait()
    assert [outcome.code for outcome in ended.values()] == [0, 0], flock.complaints()
    assert ended[0].value == ended[1].value
    assert apart(ended[0].value[0], plain(by_turns=False)[0]) < 1e-12


@pytest.mark.parametrize("models", ["", ", models=d if trains_d else g"])
def test_steps_by_turns_train_each_model_against_the_other_as_it_is_now(tmp_path: Path, models: str) -> None:
    told = results(tmp_path, BY_TURNS.replace("MODELS", models), before=BEFORE)
    assert told[0] == told[1]
    assert apart(told[0], plain(by_turns=True)[0]) < 1e-12


def test_two_plain_backward_passes_are_refused_with_advice_that_is_right_for_a_gan(tmp_path: Path) -> None:
    said = refusals(tmp_path, TOGETHER.replace(", models=d", "").replace(", models=g", ""), before=BEFORE)
    assert "models with a loss each (a GAN) give each its own, step.backward(loss, models=generator)" in said


def test_workers_that_train_unlike_models_in_one_step_are_refused(tmp_path: Path) -> None:
    choosing = "if fleet.rank == 0:\n                step.backward(g_loss(d, fake), models=g)"
    said = refusals(tmp_path, TOGETHER.replace("step.backward(g_loss(d, fake), models=g)", choosing), before=BEFORE)
    assert "other workers trained models that this one left out" in said


def test_the_reference_is_a_gan_whose_players_differ() -> None:
    """The advice of old, one backward of both losses, is something else."""
    names: dict[str, Any] = {}
    exec(BEFORE, names)
    g, d = names["networks"]()
    assert isinstance(d, nn.Module)
    real, z = names["data"].tensors
    fake = g(z)
    own = torch.autograd.grad(names["d_loss"](d, real, fake), list(d.parameters()), retain_graph=True)
    both = torch.autograd.grad(names["d_loss"](d, real, fake) + names["g_loss"](d, fake), list(d.parameters()))
    assert max(float((a - b).abs().max()) for a, b in zip(own, both)) > 0.05


@pytest.mark.parametrize("how", [[], ["--by-turns"]])
def test_the_example_learns(tmp_path: Path, how: list[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "gan.py"
    env = {"QUICK_EXIT": "1", "PACELINE_PACE": "equal"}
    with Crew(str(script), 2, tmp_path, args=["--epochs", "8", *how], env=env) as crew:
        ended = crew.wait()
    assert [outcome.code for outcome in ended] == [0, 0], ended[0].err[-2000:]
    # The Gloo of torch 2.9 and 2.10 prints lines of its own.
    told, of_the_other = ([one for one in outcome.out.splitlines() if one[:6] != "[Gloo]"] for outcome in ended)
    distances = [float(line.split()[-1]) for line in told if line.startswith("epoch")]
    assert len(distances) == 8
    assert distances[-1] < 0.75 * distances[0]
    assert not of_the_other, "the leader tells"
