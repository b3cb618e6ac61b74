from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def one_core() -> Iterator[None]:
    """One thread runs at a time: on one core its turn passes on fastest. And garbage is soon collected where the
    collector does not look at all that was imported."""
    before = os.sched_getaffinity(0)
    gc.collect()  # what is frozen is never looked at: no garbage of the last test may be in it
    gc.freeze()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        gc.unfreeze()
