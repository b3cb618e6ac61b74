"""The store of a fixed fleet: survivors read there who has died."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any

import torch.distributed

from paceline.launcher.fixed_fleet import RendezvousStore

dist: Any = torch.distributed


def test_a_death_is_told_whether_the_store_is_there_or_not() -> None:
    with closing(RendezvousStore()) as store:
        store.announce_death(1, "was killed")
        store.start()
        told = dist.TCPStore(
            store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        assert told.get("paceline/died/1") == b"was killed"
        store.announce_death(0, "ended with exit code 3")
        assert told.get("paceline/died/0") == b"ended with exit code 3"
