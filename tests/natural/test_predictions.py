"""Evaluation as people write it: values per sample give means, sums are named, predictions are gathered, and none is
taken for another."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import elastic, refusals, results

pytestmark = pytest.mark.fleet

CLASSES = """
with paceline.join(combine=os.environ.get("COMBINE", "gradients")) as fleet:
    model = fleet.model(network())
    result = fleet.evaluate(lambda x, y: {"classes": model(x).softmax(1)}, data, batch_size=8)
"""


def test_predictions_given_to_evaluate_are_refused_and_not_added_up(tmp_path: Path) -> None:
    said = refusals(tmp_path, CLASSES)
    assert "ValueError: fleet.evaluate: 'classes' has the shape (8, 3) for a batch of 8 samples" in said
    assert "For predictions of each sample call fleet.predict" in said


def test_an_evaluation_gives_one_processs_means_and_a_batchs_mean_is_refused(tmp_path: Path) -> None:
    script = """
    held_out = TensorDataset(x[:47], y[:47])
    with paceline.join(pace="fixed:1,3") as fleet:
        model = fleet.model(network())
        try:
            fleet.evaluate(lambda x, y: {"loss": loss_fn(model(x), y)}, held_out, batch_size=5)  # as everywhere else
        except ValueError as error:
            refused = str(error)
        each = nn.CrossEntropyLoss(reduction="none")
        score = lambda x, y: {"loss": each(model(x), y), "right": model(x).argmax(1) == y, "rows": len(y)}
        found = fleet.evaluate(score, held_out, batch_size=5, sums="rows")
        with torch.no_grad():
            out = model(x[:47])
            loss, right = loss_fn(out, y[:47]), (out.argmax(1) == y[:47]).double().mean()
        off = [abs(found["loss"] - loss.item()), found["right"] - right.item()]
        result = [refused, *off, found["rows"], found["count"]]
    """
    for refused, loss, right, rows, count in results(tmp_path, script):
        assert "'loss' is one number for a batch of 5 samples, which may be their mean or their sum" in refused
        assert loss < 1e-14
        assert (right, rows, count) == (0, 47, 47)


def test_a_name_that_only_one_workers_samples_gave_is_refused(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        rare = torch.arange(48) >= 40
        def score(x, rare):
            return {"right": rare, **({"rare": rare} if rare.any() else {})}
        result = fleet.evaluate(score, TensorDataset(x, rare), batch_size=24)
    """
    assert "the function returned 'rare' on one worker and not on another" in refusals(tmp_path, script)


GATHERED = """
def area(scores, truth):
    order = scores.argsort()
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    good = int(truth.sum())
    return float((ranks[truth].sum() - good * (good + 1) / 2) / (good * (len(truth) - good)))

with paceline.join(combine=os.environ.get("COMBINE", "gradients")) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    result = []
    numbered = TensorDataset(torch.arange(47), x[:47], y[:47])
    def predict(number, x, y):
        return {"number": number, "score": model(x).softmax(1)[:, 1], "truth": y == 1}
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=2):
        for bx, by in step:
            step.backward(loss_fn(model(bx), by))
        step.commit(optimizer)
        if step.ends_epoch:
            found = fleet.predict(predict, DataLoader(numbered, batch_size=5, shuffle=True))
            assert found["number"].tolist() == list(range(47))
            result.append(area(found["score"], found["truth"]))
            lone = fleet.predict(predict, torch.utils.data.Subset(numbered, [7]), to="leader")
            assert (lone is None) == (not fleet.is_leader)
            assert fleet.predict(lambda number, x, y: number, torch.utils.data.Subset(numbered, [7])).tolist() == [7]
    result.append(flat(model))
"""


@pytest.mark.parametrize("combine", ["gradients", "average"])
def test_a_figure_of_all_predictions_is_that_of_one_machine(tmp_path: Path, combine: str) -> None:
    three = results(tmp_path / "three", GATHERED, workers=3, COMBINE=combine, PACELINE_PACE="fixed:5,1,2")
    assert three[0] == three[1] == three[2]
    if combine == "gradients":
        alone = results(tmp_path / "one", GATHERED, workers=1)
        assert three[0][:-1] == pytest.approx(alone[0][:-1], abs=1e-12)


def test_rows_that_only_one_worker_cannot_give_are_refused_everywhere(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        model = fleet.model(network())
        words = lambda number, x: torch.zeros(len(x), 3 if number[0] < 24 else 4)
        result = fleet.predict(words, TensorDataset(torch.arange(48), x), batch_size=8)
    """
    said = refusals(tmp_path, script)
    assert said.count("ValueError: fleet.predict(): a sample's prediction is float32 [3]") == 2
    assert "float32 [4] on worker 1: pad it to one size" in said


DYING = """
import signal
from pathlib import Path
from paceline.training import predict as predicting
mark = Path(os.environ["PACELINE_RUN_DIR"]).parent / "died"

def die_here():
    if os.environ["PACELINE_WORKER"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def dying(function):
    def first(*args):
        die_here()
        return function(*args)
    return first

with paceline.join() as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    def predict(number, x):
        return number, model(x)
    if os.environ["WHERE"] == "predict":
        predict = dying(predict)
    else:
        setattr(predicting, os.environ["WHERE"], dying(getattr(predicting, os.environ["WHERE"])))
    for step in fleet.steps(data, global_batch=12, micro_batch=3):
        for bx, by in step:
            step.backward(loss_fn(model(bx), by))
        step.commit(optimizer)
        if step.index == 1:
            numbers, found = fleet.predict(predict, TensorDataset(torch.arange(48), x), batch_size=4)
            with torch.no_grad():
                assert torch.allclose(found, model(x), atol=1e-12)
            result = [numbers.tolist(), fleet.world_size]
"""


@pytest.mark.parametrize("where", ["predict", "packed", "unpacked"])
def test_those_left_predict_the_part_of_a_worker_that_dies_meanwhile(tmp_path: Path, where: str) -> None:
    with elastic(tmp_path, DYING, workers=3, env={"WHERE": where}) as flock:
        ended = flock.wait()
    assert (tmp_path / "died").exists()
    for slot in (0, 2):
        assert ended[slot].code == 0, ended[slot].err[-3000:]
        assert ended[slot].value == [list(range(48)), 2]
