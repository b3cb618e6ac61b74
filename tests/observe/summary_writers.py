"""A stand-in for torch's SummaryWriter, which needs TensorBoard: its event file holds a line of JSON for each call."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NUMBERS = itertools.count()


class SummaryWriter:
    """A writer with the signatures of torch.utils.tensorboard's, as strict about numbers as its protocol buffers."""

    def __init__(
        self,
        log_dir: str | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
    ) -> None:
        assert isinstance(log_dir, str)
        self.file = (Path(log_dir) / f"events.out.tfevents.{next(NUMBERS):010d}.here{filename_suffix}").open("w")

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        assert isinstance(scalar_value, float)
        assert abs(scalar_value) <= 3.4e38
        assert isinstance(global_step, int)
        assert 0 <= global_step < 1 << 63
        assert isinstance(walltime, float)
        print(json.dumps([tag, scalar_value, global_step, walltime], allow_nan=False), file=self.file)


def calls(file: Path) -> list[list[Any]]:
    """Return tag, value, step and time of every call, in order."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@contextmanager
def stand_in() -> Iterator[None]:
    """Replace torch.utils.tensorboard, whether or not its package is there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))  # type: ignore[arg-type]
        yield
