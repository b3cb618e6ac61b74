"""The look at the main thread for collectives that the script calls itself."""

from __future__ import annotations

import gc
import subprocess
import sys

from paceline.transport.call_sequences import ForeignCalls

LITTER = """
import gc, threading
from paceline.transport.call_sequences import ForeignCalls

class Node:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

foreign = ForeignCalls()
gc.collect()
gc.freeze()
for threshold in range(1, 60):
    gc.set_threshold(threshold)
    for _ in range(20):
        Node()
        foreign.current()
"""


def test_a_look_ends_whatever_is_garbage_meanwhile() -> None:
    """A collection in the middle of the look would end a `threading.local`, which waits for the look on Python 3.11."""
    subprocess.run([sys.executable, "-c", LITTER], check=True, timeout=60.0)


def test_a_look_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    ForeignCalls().current()
    assert gc.isenabled()
    gc.disable()
    try:
        ForeignCalls().current()
        assert not gc.isenabled()
    finally:
        gc.enable()
