"""What a script does before its first loop, behind one that it left with ``break``, and between two."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from flock import sound
from programs import BEFORE, elastic, results

pytestmark = pytest.mark.fleet

PROMISED = """
import time
from deadline_cases import Deadline
from paceline.step.late import catch_up

if os.environ["RANK"] == "1":
    catch_up.MOST_BYTES = 0  # as with a large model: it is promised a copy instead of the sums that it missed
path = os.environ["CHECKPOINT"]
with paceline.join(Deadline(0.1)) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    fleet.save(path)
    steps = fleet.steps(data, global_batch=8, micro_batch=2, epochs=2)._loop
    for step in steps:
        for a, b in step:
            while fleet.rank == 1 and step.index == 1 and steps.training.index < 3:
                time.sleep(0.005)
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
        if step.index >= 2:
            break  # before it gives the copy that worker 1 asked for in this step's round
    CALL
    result = {"weights": flat(model), "first": flat(network())}
"""


@pytest.mark.parametrize("call", ["load", "track"])
def test_behind_a_break_a_late_worker_does_without_the_copy_it_was_promised(tmp_path: Path, call: str) -> None:
    calls = {"load": "fleet.load(path)", "track": "fleet.track(ema=torch.optim.swa_utils.AveragedModel(model))"}
    script = PROMISED.replace("CALL", calls[call])
    one, other = results(tmp_path, script, PACELINE_PACE="", CHECKPOINT=str(tmp_path / "first"))
    assert one["weights"] == other["weights"]
    assert (one["weights"] == one["first"]) == (call == "load")


def test_a_late_worker_asks_for_no_copy_of_a_state_that_nobody_could_give(tmp_path: Path) -> None:
    script = """
    import time
    import numpy as np
    from deadline_cases import Deadline
    from paceline.step.late import catch_up

    catch_up.MOST_BYTES = 0
    class Meter:
        def state_dict(self):
            return {"values": np.zeros(1)}
        def load_state_dict(self, state):
            pass
    with paceline.join(Deadline(0.1)) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer, meter=Meter())
        steps = fleet.steps(data, global_batch=8, micro_batch=2)._loop
        for step in steps:
            for a, b in step:
                if fleet.rank == 1 and step.index == 2:
                    time.sleep(0.4)
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
        result = flat(model)
    """
    one, other = results(tmp_path, script, PACELINE_PACE="")
    assert one == other


def test_a_late_worker_may_take_over_a_copy_of_the_state_after_the_last_step(tmp_path: Path) -> None:
    script = """
    import time
    from deadline_cases import Deadline
    from paceline.step.late import catch_up

    if os.environ["RANK"] == "1":
        catch_up.MOST_BYTES = 0  # as with a large model: it is promised a copy instead of the sums that it missed
    with paceline.join(Deadline(0.1)) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        begun = []
        for epochs in (1, 1):
            steps = fleet.steps(data, global_batch=8, micro_batch=2, epochs=epochs)._loop
            for step in steps:
                begun.append(step.index)
                for a, b in step:
                    while fleet.rank == 1 and step.index == 4 and not steps.training.finished:
                        time.sleep(0.005)
                    step.backward(loss_fn(model(a), b))
                step.commit(optimizer)
        result = {"weights": flat(model), "begun": begun}
    """
    one, other = results(tmp_path, script, PACELINE_PACE="")
    assert one["weights"] == other["weights"]
    assert one["begun"] == list(range(12))
    assert other["begun"] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("then", ["", "train(range(99))"], ids=["the end", "another loop"])
def test_averaging_by_the_clock_a_loop_may_be_left(tmp_path: Path, then: str) -> None:
    script = """
    import time
    with paceline.join(combine=paceline.Averaging(period_s=0.1)) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        def train(indices):
            for step in fleet.steps(data, global_batch=4, micro_batch=2, epochs=2):
                for a, b in step:
                    time.sleep(0.005 if fleet.rank == 0 else 0.03)
                    step.backward(loss_fn(model(a), b))
                step.commit(optimizer)
                if step.index not in indices:
                    break
        train(range(9))
        THEN
    result = flat(model)
    """
    one, other = results(tmp_path, script.replace("THEN", then))
    assert one == other


def test_a_resumed_run_draws_the_same_numbers_between_loops(tmp_path: Path) -> None:
    script = """
    def run(resume):
        drawn = []
        torch.manual_seed(0)
        with paceline.join() as fleet:
            model = fleet.model(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fleet.track(optimizer=optimizer)
            if resume:
                fleet.load(os.environ["CHECKPOINT"], loops="all")
            for epoch in range(3):
                for step in fleet.steps(data, global_batch=12, micro_batch=6):
                    for a, b in step:
                        step.backward(loss_fn(model(a), b))
                    step.commit(optimizer)
                    if epoch == 2 and step.index == 9 and not resume:
                        fleet.save(os.environ["CHECKPOINT"])
                fleet.evaluate(lambda a, b: {"hit": model(a).argmax(1) == b}, data, sums="hit")
                drawn.append(torch.rand(()).item())
        return drawn, flat(model)
    result = run(False), run(True)
    """
    ((whole, resumed),) = results(tmp_path, script, workers=1, CHECKPOINT=str(tmp_path / "checkpoint"))
    assert resumed == whole
    assert len(set(whole[0])) == 3


def test_a_step_left_in_its_middle_leaves_the_scripts_own_numbers_as_they_were(tmp_path: Path) -> None:
    script = """
    import random
    import numpy as np
    def run(leave):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        drawn = []
        with paceline.join() as fleet:
            model = fleet.model(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps = fleet.steps(data, global_batch=12, micro_batch=3)
            if leave:
                for step in steps:
                    for a, b in step:
                        break
                    break
            for step in steps:
                for a, b in step:
                    step.backward(loss_fn(model(a), b))
                step.commit(optimizer)
                drawn.append([np.random.rand(), random.random(), torch.rand(()).item()])
        return drawn
    result = run(False), run(True)
    """
    ((whole, left),) = results(tmp_path, script, workers=1)
    assert left == whole
    assert len({numbers[0] for numbers in whole}) == 4


def test_workers_may_track_the_same_things_in_another_order(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        last = torch.optim.Adam(model[2].parameters(), lr=0.01)
        things = {
            "first": first,
            "last": last,
            "steps": torch.optim.lr_scheduler.StepLR(first, 2),
            "decay": torch.optim.lr_scheduler.ExponentialLR(last, 0.9),
        }
        for name in sorted(things, reverse=fleet.rank == 1):
            fleet.track(**{name: things[name]})
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(first, last)
            things["steps"].step()
            things["decay"].step()
        result = flat(model)
    """
    one, other = results(tmp_path, script)
    assert one == other


FREEZES = """
import signal
import time
def freeze_in(step):
    if os.environ["PACELINE_WORKER"] == "1" and step.index == 3 and not os.path.exists(os.environ["FROZEN"]):
        open(os.environ["FROZEN"], "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_worker_that_fell_out_in_its_last_step_does_not_end_as_if_it_were_whole(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(data, global_batch=6, micro_batch=2):
            for a, b in step:
                freeze_in(step)
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
            if step.index == 3:
                break
        while os.environ["PACELINE_WORKER"] != "1" and not os.path.exists(os.environ["ENDED"]):
            time.sleep(0.01)
        fleet.barrier()
    result = {"weights": flat(model)}
    """
    env = {"FROZEN": str(tmp_path / "frozen"), "ENDED": str(tmp_path / "ended")}
    with elastic(tmp_path, script, workers=3, before=BEFORE + FREEZES, env=env) as fleet:
        fleet.wait_for_step(3)
        fleet.send(1, signal.SIGCONT)
        fleet.wait_for_end(1)
        (tmp_path / "ended").touch()
        ended = fleet.wait()
    assert [one.code for one in ended.values()] == [0, 75, 0], ended[1].err[-2000:]
    assert "its script ended before it could enter again" in ended[1].err
    assert ended[0].value == ended[2].value


@pytest.mark.parametrize("combine", ["gradients", "average"])
def test_a_worker_that_fell_out_in_one_loop_enters_in_the_next(tmp_path: Path, combine: str) -> None:
    script = """
    with paceline.join(combine=os.environ["MERGE"]) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.track(optimizer=optimizer)
        for epochs in (1, 40):
            for step in fleet.steps(data, global_batch=12, micro_batch=2, epochs=epochs):
                for a, b in step:
                    if epochs == 1:
                        freeze_in(step)
                    elif not os.path.exists(os.environ["ENDED"]):
                        time.sleep(0.02)
                    step.backward(loss_fn(model(a), b))
                step.commit(optimizer)
    result = {"weights": flat(model)}
    """
    env = {"FROZEN": str(tmp_path / "frozen"), "ENDED": str(tmp_path / "ended"), "MERGE": combine}
    with elastic(tmp_path, script, workers=3, before=BEFORE + FREEZES, env=env) as fleet:
        fleet.wait_until(lambda: any(one["epoch"] > 0 for one in fleet.records()))
        fleet.send(1, signal.SIGCONT)
        fleet.wait_for_workers(3)
        (tmp_path / "ended").touch()
        ended = fleet.wait()
    run, _ = sound(tmp_path, ended, ended={0, 1, 2}, epochs=None, length=48)
    assert [len(change.workers) for change in run.changes] == [2, 3]


def test_a_script_may_leave_by_itself_before_the_block_ends(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in fleet.steps(data, global_batch=12, micro_batch=3):
            for a, b in step:
                step.backward(loss_fn(model(a), b))
            step.commit(optimizer)
        fleet.leave()
    result = flat(model)
    """
    one, other = results(tmp_path, script)
    assert one == other


FISHER = """
def fisher(model):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for a, b in zip(x[:5], y[:5]):
        model.zero_grad()
        loss_fn(model(a[None]), b[None]).backward()
        for one, p in zip(total, model.parameters()):
            one += 0 if p.grad is None else p.grad ** 2
    return total

def penalised(model, a, b, fishers, anchors):
    pairs = zip(fishers, anchors, model.parameters())
    return loss_fn(model(a), b) + sum((f * (p - q) ** 2).sum() for f, q, p in pairs)

def anchors_of(model):
    return [p.detach().clone() for p in model.parameters()]

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fishers = anchors = ()
    for task in range(2):
        if task:
            model[0].requires_grad_(False)  # its gradients of the Fisher information are left over
        steps = fleet.steps(data, global_batch=12, micro_batch=3, shuffle=False)
        for step in steps:
            for a, b in step:
                step.backward(penalised(model, a, b, fishers, anchors))
            step.commit(optimizer)
            if LEAVES and step.index % 4 == 3:
                break
        fishers, anchors = fisher(model), anchors_of(model)
    ours = flat(model)

    plain, fishers, anchors = network(), (), ()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for task in range(2):
        if task:
            sgd.zero_grad()
            plain[0].requires_grad_(False)
        for start in range(0, 48, 12):
            sgd.zero_grad()
            part = slice(start, start + 12)
            penalised(plain, x[part], y[part], fishers, anchors).backward()
            sgd.step()
        fishers, anchors = fisher(plain), anchors_of(plain)
    result = ours, flat(plain)
"""


@pytest.mark.parametrize("leaves", [False, True], ids=["at its end", "by break"])
def test_behind_a_loop_a_script_may_call_backward_itself(tmp_path: Path, leaves: bool) -> None:
    script = FISHER.replace("LEAVES", str(leaves))
    for ours, plain in results(tmp_path, script, PACELINE_PACE="fixed:1,3"):
        assert ours == pytest.approx(plain, abs=1e-12)
