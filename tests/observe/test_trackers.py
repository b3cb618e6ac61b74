"""Figures of the user's own: who writes them, in which call, and what is no figure."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lone import join, linear, numbers, sgd, training
from paceline.observe import read_log
from paceline.observe.exports import write_tensorboard, write_to
from paceline.observe.log.reader import logged_figures


class SummaryWriter:
    """A writer with the signature of torch.utils.tensorboard's."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.flushed = self.closed = False

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        self.told.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.flushed = True

    def close(self) -> None:
        self.closed = True


class Run:
    """A writer with the signature of a wandb run's."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.finished = False

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.told.append((data, step))

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.finished = True


class Mlflow:
    """A writer with the signature of the mlflow module's."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
        model_id: str | None = None,
        dataset: Any = None,
    ) -> None:
        self.told.append((metrics, step))


def test_every_kind_of_writer_gets_the_figures_of_the_step(tmp_path: Path) -> None:
    board, run, mlflow, told = SummaryWriter(), Run(), Mlflow(), []
    with join(tmp_path) as fleet:
        model = fleet.model(linear())
        for writer in (board, run, mlflow, lambda figures, step: told.append((figures, step))):
            fleet.log_to(writer)
        fleet.log_to(None)
        fleet.log(begun=True)
        for step in training(fleet, model, sgd(model), numbers(16), global_batch=8, micro_batch=4):
            fleet.log({"train/loss": torch.tensor([0.5])}, rate=np.float32(0.25))
            fleet.log(late=1, step=step.index + 100)
    figures = {"train/loss": 0.5, "rate": 0.25}
    expected = [({"begun": 1.0}, 0)]
    for index in (0, 1):
        expected += [(figures, index), ({"late": 1.0}, index + 100)]
    assert run.told == mlflow.told == told == expected
    assert board.told == [(name, value, step) for row, step in expected for name, value in row.items()]
    assert board.flushed
    assert not board.closed, "it is the user's own"
    assert [(step, row) for step, _, row in logged_figures(read_log(tmp_path / "run").others)] == [
        (s, r) for r, s in expected
    ]


def test_a_writer_is_made_when_first_needed_and_ended_with_the_fleet(tmp_path: Path) -> None:
    made: list[Run] = []

    def make() -> Run:
        made.append(Run())
        return made[-1]

    with join(tmp_path) as fleet:
        fleet.log_to(make=make)
        assert not made
        fleet.log(a=1)
        fleet.log(a=2)
    assert [run.told for run in made] == [[({"a": 1.0}, 0), ({"a": 2.0}, 0)]]
    assert made[0].finished


def test_logged_figures_are_in_the_tensorboard_export(tmp_path: Path, summary_writer: None) -> None:
    with join(tmp_path) as fleet:
        fleet.log({"train/loss_of_mine": 0.5})
    file = write_tensorboard(read_log(tmp_path / "run"), tmp_path / "board")
    assert b"train/loss_of_mine" in file.read_bytes()


def test_a_nan_is_a_figure_and_the_log_stays_json(tmp_path: Path) -> None:
    told: list[Any] = []
    with join(tmp_path) as fleet:
        fleet.log_to(lambda figures, step: told.append(figures["x"]))
        fleet.log(x=float("nan"))
    assert told[0] != told[0]
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("value", ["0.5", [0.5], torch.zeros(2), None, {"nested": 1}])
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    with join(tmp_path) as fleet, pytest.raises(ValueError, match=r"takes numbers, and 'x' is a .*fleet\.is_leader"):
        fleet.log(x=value)


@pytest.mark.parametrize("writer", [logging.getLogger("mine"), 3, "runs/board"])
def test_what_is_no_writer_is_refused_by_name(writer: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(writer).__name__} has none of"):
        write_to(writer)


def test_a_writer_that_never_worked_is_an_error_and_one_that_fails_later_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(figures: dict[str, float], step: int) -> None:
        if figures["a"] > 0:
            raise ConnectionError("no route")

    with join(tmp_path) as fleet:
        fleet.log_to(away)
        with pytest.raises(ConnectionError):
            fleet.log(a=1)
        fleet.log(a=0)
        fleet.log(a=1)
        fleet.log(a=1)
    said = [record.getMessage() for record in caplog.records if "fleet.log" in record.getMessage()]
    assert len(said) == 1
    assert "failed (no route): the training goes on" in said[0]


def test_the_real_tensorboard_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter as Real

    with join(tmp_path) as fleet:
        fleet.log_to(make=lambda: Real(str(tmp_path / "board")))
        fleet.log({"a/b": 0.5}, step=3)
    assert b"a/b" in b"".join(file.read_bytes() for file in (tmp_path / "board").iterdir())
