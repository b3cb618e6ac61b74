"""State that a returning worker, or a resumed run, would not have: tracked, or named and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from flock import Flock
from programs import apart, back_after_a_kill, elastic, outcomes, refusals, results

pytestmark = pytest.mark.fleet

TRAINING = """
from pathlib import Path
import time

def pause(step):
    beside = Path(os.environ["PACELINE_RUN_DIR"]).with_name("hurry")
    if not beside.exists():
        time.sleep(0.02)

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    SETUP
    rates = []
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=EPOCHS):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
            INSIDE
        COMMIT
        AFTER
    result = {"weights": flat(model), "rate": optimizer.param_groups[0]["lr"]}
"""


def script(
    setup: str = "", *, commit: str = "step.commit(optimizer)", inside: str = "", after: str = "", epochs: int = 2
) -> str:
    parts = {"SETUP": setup or "pass", "COMMIT": commit, "INSIDE": inside or "pass", "AFTER": after or "pass"}
    text = TRAINING.replace("EPOCHS", str(epochs))
    for name, part in parts.items():
        indent = {"SETUP": 4, "INSIDE": 12, "COMMIT": 8, "AFTER": 8}[name]
        text = text.replace(name, part.replace("\n", "\n" + " " * indent))
    return text


OWN_STEP = """step.reduce()
optimizer.step()
step.commit()"""
SCHEDULE = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)"
TRACK_ALL = "fleet.track(optimizer=optimizer, scheduler=scheduler)"


def refused(fleet: Flock) -> str:
    with fleet:
        ended = fleet.wait()
    assert all(one.code != 0 for one in ended.values()), [(one.code, one.err[-1500:]) for one in ended.values()]
    return "\n".join(one.err for one in ended.values())


def test_an_optimizer_that_the_script_steps_itself_must_be_tracked_where_workers_come_and_go(tmp_path: Path) -> None:
    said = refused(elastic(tmp_path / "no", script(commit=OWN_STEP)))
    assert "fleet.track(optimizer=optimizer)" in said
    tracked = script("fleet.track(optimizer=optimizer)", commit=OWN_STEP)
    with elastic(tmp_path / "yes", tracked) as fleet:
        values = [one.value for one in fleet.wait().values()]
    assert values[0] == values[1]
    assert apart(values[0]["weights"], results(tmp_path / "one", tracked, workers=1)[0]["weights"]) < 1e-12


@pytest.mark.parametrize(
    ("setup", "after", "name"),
    [
        (f"{SCHEDULE}\nfleet.track(optimizer=optimizer)", "scheduler.step()", "scheduler=LambdaLR"),
        (
            "ema = torch.optim.swa_utils.AveragedModel(model)\nfleet.track(optimizer=optimizer)",
            "ema.update_parameters(model)",
            "ema=AveragedModel",
        ),
    ],
    ids=["schedule", "average of the weights"],
)
def test_what_a_joiner_could_not_take_over_is_refused_by_name(
    tmp_path: Path, setup: str, after: str, name: str
) -> None:
    assert name in refused(elastic(tmp_path, script(setup, after=after)))


def test_with_everything_tracked_a_worker_that_returns_has_the_others_rates_and_weights(tmp_path: Path) -> None:
    text = script(f"{SCHEDULE}\n{TRACK_ALL}", commit=OWN_STEP, after="scheduler.step()\npause(step)", epochs=40)
    ended = back_after_a_kill(tmp_path, text, at_step=5)
    assert ended[0] == ended[1]


HOME_MADE = """
class Schedule:
    steps = 0
    def step(self):
        self.steps += 1
        optimizer.param_groups[0]["lr"] = 0.01 * 0.97**self.steps
scheduler = Schedule()
fleet.track(optimizer=optimizer)"""


def test_a_schedule_that_began_anew_on_a_returned_worker_is_seen_within_a_step(tmp_path: Path) -> None:
    text = script(HOME_MADE, after="scheduler.step()\npause(step)", epochs=2000)
    with elastic(tmp_path, text) as fleet:
        fleet.wait_for_step(5)
        fleet.kill(1)
        fleet.wait_for_workers(1)
        fleet.start(1)
        ended = fleet.wait()
    said = "\n".join(one.err for one in ended.values())
    assert all(one.code != 0 for one in ended.values())
    assert "lr in group 0 of optimizer is" in said
    assert "on worker 0 and" in said


def test_a_schedule_stepped_for_every_micro_batch_is_refused_and_told_where_it_belongs(tmp_path: Path) -> None:
    """However many workers there are, and though all have as many micro-batches."""
    text = script(f"{SCHEDULE}\n{TRACK_ALL}", inside="scheduler.step()")
    for workers in (1, 2):
        said = refusals(tmp_path / str(workers), text, workers=workers)
        assert "lr in group 0 of optimizer changed from 0.0097 to" in said
        assert "between two micro-batches of step 0" in said
        assert "behind step.commit" in said


def test_a_rate_that_is_set_anew_in_every_micro_batch_is_no_trouble(tmp_path: Path) -> None:
    rate = "optimizer.param_groups[0]['lr'] = 0.01 * 0.9**step.index"
    inside = results(tmp_path / "inside", script("fleet.track(optimizer=optimizer)", inside=rate))
    assert inside[0] == inside[1]
    before = results(
        tmp_path / "after", script("fleet.track(optimizer=optimizer)", commit=f"{rate}\nstep.commit(optimizer)")
    )
    assert inside == before


def test_where_workers_have_one_micro_batch_or_none_the_rates_tell_that_a_schedule_stands_inside(
    tmp_path: Path,
) -> None:
    text = script(f"{SCHEDULE}\n{TRACK_ALL}", inside="scheduler.step()").replace("micro_batch=3", "micro_batch=12")
    said = refusals(tmp_path, text, PACELINE_PACE="fixed:0,1")
    assert "workers update with unlike settings in step 1" in said
    assert "move it behind step.commit" in said


def test_a_rate_that_depends_on_the_rank_is_refused(tmp_path: Path) -> None:
    said = refusals(
        tmp_path, script("optimizer.param_groups[0]['lr'] *= 1 + fleet.rank\nfleet.track(optimizer=optimizer)")
    )
    assert "lr in group 0 of optimizer is 0.01 on worker 0 and 0.02 on worker 1" in said


def test_names_that_only_some_track_are_refused_at_the_first_step_and_at_save(tmp_path: Path) -> None:
    only_the_leader = "if fleet.is_leader:\n    fleet.track(optimizer=optimizer)"
    said = refusals(tmp_path / "first", script(only_the_leader))
    assert "fleet.track()" in said, "who waits where is named"
    later = "if fleet.is_leader:\n    fleet.track(late=nn.Linear(1, 1))\nfleet.save('c.pt')"
    assert "['late'] on worker 0 and [] on worker 1" in refusals(tmp_path / "save", script(after=later))


def test_tracking_after_the_first_step_is_refused_where_workers_come_and_go(tmp_path: Path) -> None:
    later = "if step.index == 2:\n    fleet.track(late=nn.Linear(1, 1))"
    said = refused(elastic(tmp_path, script("fleet.track(optimizer=optimizer)", after=later)))
    assert "track everything before the loop" in said


def test_saving_without_an_optimizer_warns_and_loading_without_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    saved = outcomes(tmp_path / "save", script(after=f"fleet.save({str(path)!r})"))
    assert all(one.code == 0 for one in saved), [one.err for one in saved]
    assert "fleet.track(optimizer=Adam)" in (tmp_path / "save" / "run" / "events.jsonl").read_text()
    said = refusals(tmp_path / "load", script(f"fleet.load({str(path)!r})"))
    assert "call fleet.track(optimizer=Adam) before it" in said


def test_a_layer_replaced_between_two_loops_has_the_leaders_weights_everywhere(tmp_path: Path) -> None:
    text = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        for phase in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in fleet.steps(data, global_batch=12, micro_batch=3):
                for a, b in step:
                    step.backward(loss_fn(model(a), b))
                step.commit(optimizer)
            if phase == 0:
                torch.manual_seed(7 + (fleet.rank if SEVERAL else 0))
                model[2] = nn.Linear(8, 3).double()
                model.extra = nn.Parameter(torch.randn(2, dtype=torch.float64))
        result = flat(model)
    """
    two = results(tmp_path / "two", text.replace("SEVERAL", "True"))
    one = results(tmp_path / "one", text.replace("SEVERAL", "False"), workers=1)
    assert two[0] == two[1]
    assert apart(two[0], one[0]) < 1e-12


def test_parameters_that_only_some_workers_add_are_refused(tmp_path: Path) -> None:
    text = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        if fleet.rank:
            model.extra = nn.Parameter(torch.randn(2, dtype=torch.float64))
        fleet.steps(data, global_batch=12)
    """
    assert "the number of parameters is 4 on worker 0 and 5 on worker 1" in refusals(tmp_path, text)


@pytest.mark.parametrize("once", [False, True])
def test_replicas_that_part_stop_the_run_before_the_update_and_the_causes_are_named(tmp_path: Path, once: bool) -> None:
    part = """
if fleet.rank and (not ONCE or step.index == 2):
    with torch.no_grad():
        model[0].weight.add_(0.5)""".replace("ONCE", str(once))
    said = refusals(tmp_path, script("fleet.track(optimizer=optimizer)", after=part.strip(), epochs=3))
    assert f"in step {4 if once else 1} worker 1 does not hold what worker 0 does: parameter 0.weight" in said
    assert "each worker's own (random numbers drawn outside of the steps" in said
