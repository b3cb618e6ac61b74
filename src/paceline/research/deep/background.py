"""Learning while a run trains: the leader's own history, in a process that gets only what the cores have to spare.

The leader needs two lines:

    learner = pacer.learner()                 # None unless the pacer's forecast learns
    learner.after(record)                     # after every step it observed; and learner.close() at the end
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.pace.forecast import Floats, Mask
from paceline.records import StepRecord
from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.model import DeepModel, load_model
from paceline.research.deep.recordings import LEAST_STEPS

logger = logging.getLogger("paceline.learning")

Steps = tuple[Floats, Mask]
"""Seconds and who was late, steps x workers."""
EVERY = 200
"""New steps before a model is trained, and again before the next."""
UPDATES = 1000
END_S = 5.0
"""Seconds a trainer that is told to end has for it."""


class BackgroundLearner:
    """Trains models in a process of its own, one at a time.

    ``after`` starts a training on the forecast's own series when at least ``every`` steps are new, and hands it the
    model once ``poll`` gives that. Neither waits. A trainer that fails is warned of once; then nothing more is trained
    and the forecast stays the one that needs no training. ``close`` leaves nothing running and no files.
    """

    def __init__(self, *, every: int = EVERY, updates: int = UPDATES, forecast: Deep) -> None:
        if every < LEAST_STEPS:
            raise ValueError(f"a model is learned from at least {LEAST_STEPS} new steps, not {every}")
        self.every, self.updates = every, updates
        self._forecast = forecast
        self._offered = self._steps = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether a model is being trained."""
        return self._process is not None

    def after(self, record: StepRecord) -> None:
        """Take note of an observed step: hand a ready model to the forecast, or offer it what was seen. Quick."""
        self._steps += 1
        if (model := self.poll()) is not None:
            logger.info("step %d: a forecast was learned from this run; it speaks while it wins", record.step)
            self._forecast.adopt(model)
        elif not self.busy and self._steps - self._offered >= self.every:
            self._start(self._forecast.series())

    def poll(self) -> DeepModel | None:
        """Return the model that was being trained, once, when it is ready."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        try:
            if code == 0:
                return load_model(self._file("model.pt"))
            self._give_up(self._last_words())
        except ValueError as error:
            self._give_up(str(error))
        return None

    def close(self) -> None:
        """End a training under way and remove its files."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> BackgroundLearner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, series: Sequence[Steps]) -> None:
        usable = [part for part in series if len(part[0]) >= LEAST_STEPS and part[0].shape[1] > 1]
        self._offered = self._steps
        if self._failed or not usable:
            return
        try:
            self._launch(usable)
        except OSError as error:
            self._give_up(str(error))

    def _launch(self, series: Sequence[Steps]) -> None:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="paceline-learning-")
        arrays: dict[str, Any] = {f"seconds{i}": seconds for i, (seconds, _) in enumerate(series)}
        arrays |= {f"late{i}": late for i, (_, late) in enumerate(series)}
        np.savez(self._file("series.npz"), **arrays)
        command = [sys.executable, "-m", "paceline.research.deep.trainer", self._folder.name]
        with self._file("words").open("wb") as words:
            self._process = subprocess.Popen(
                [*command, str(self.updates), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=_environment(),
            )

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / name

    def _last_words(self) -> str:
        lines = self._file("words").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _give_up(self, why: str) -> None:
        self._failed = True
        logger.warning("the background training of the forecast failed (%s): the general forecast stays in use", why)


def _environment() -> dict[str, str]:
    """Return an environment with one thread, no GPU and the same Paceline; nothing by which it could be a worker."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    source = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
