"""The fleet that the Accelerators of a script are in, and what Accelerate's own objects know of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from paceline import concurrency
from paceline.adapters.accelerate.refusals import check_pace, refuse_split
from paceline.errors import MisuseError
from paceline.fleet import Fleet
from paceline.pace import with_a_sample_for_each
from paceline.training.join import join_training
from paceline.training.same_data import SameData
from paceline.transport import joins_roster

if TYPE_CHECKING:
    from paceline.adapters.accelerate.accelerator import Accelerator

LONGEST_SEED = 2**63 - 1
ABSENT: dict[str, Any] = {
    "pace": None,
    "combine": "gradients",
    "device": None,
    "seed": None,
    "nonfinite": "stop",
    "comm_dtype": "float32",
    "name": None,
    "run_dir": None,
    "quiet": False,
}
"""Arguments of `paceline.join` as an Accelerator has them that was given none."""


class JoinedFleet:
    """One worker's fleet, shared by all Accelerators of the script. ``asked`` holds arguments of `paceline.join`."""

    current: JoinedFleet | None = None
    """The fleet that this process has joined last."""
    _accelerator: Accelerator | None = None
    """The script's newest Accelerator."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = dict(asked)
        self._local_rank = os.environ.get("LOCAL_RANK", "")
        self._join()
        JoinedFleet.current = self
        concurrency.before_threads_end(self._at_exit)

    def _join(self) -> None:
        asked = {**self._asked, "seed": self._asked["seed"] or 0}
        pace = asked.pop("pace")
        # Every worker has a sample in every step where there are enough, so the script's own code runs in all of them.
        pace = with_a_sample_for_each() if pace in (None, "auto") else pace
        combine = os.environ.get("PACELINE_COMBINE") or asked.pop("combine")
        if combine != "gradients":
            raise ValueError(
                f"combine={combine!r} does not go with Accelerate's loop: with averages of parameters workers make "
                'unlike numbers of updates; use "gradients", or a loop over fleet.steps'
            )
        self.context = join_training(pace, "gradients", **{k: v for k, v in asked.items() if k != "combine"})
        self.fleet = Fleet(self.context)
        self.same_data = SameData(self.context)
        self.left = False
        self._tracked: dict[int, tuple[str, Any]] = {}
        self._counts: dict[str, int] = {}
        self._seeded = self._asked["seed"] is not None or self.context.elastic is not None
        try:
            check_pace(self.context.pacer)
            if self.context.transport.grouped:
                raise ValueError("Accelerate's loop has one process per worker: leave --procs-per-worker out")
        except ValueError as error:
            self.leave(error)
            raise
        self.several = self.fleet.world_size > 1 or self.context.elastic is not None
        """Whether there are, or may be, other workers."""

    def belong_to(self, accelerator: Accelerator) -> None:
        """Take the script's newest Accelerator, and show Accelerate's own objects the fleet."""
        self._accelerator = accelerator
        self.show_members()

    def check_asked(self, asked: Mapping[str, Any]) -> None:
        """Raise MisuseError where a later Accelerator asks for another fleet than this one."""
        for name, value in asked.items():
            if value not in (ABSENT[name], self._asked[name]):
                raise MisuseError(
                    f"a second Accelerator({name}={value!r}) in a script whose fleet was joined with "
                    f"{name}={self._asked[name]!r}: give it to the first one, or call end_training() before"
                )

    @staticmethod
    def current_accelerator() -> Accelerator | None:
        """Return the newest Accelerator; None where it has no other workers."""
        current = JoinedFleet.current
        return current._accelerator if current is not None and current.several else None

    # -- leaving -----------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the fleet, unless it was left."""
        if not self.left:
            self.left = True
            self.fleet.leave(error)

    def _at_exit(self) -> None:
        self.leave(getattr(sys, "last_value", None))

    def renew(self) -> None:
        """Leave the fleet and join the same workers again, for a training of another model."""
        if joins_roster():
            raise MisuseError(
                "a second training in one script, where workers come and go: a worker that joins later would begin "
                "with the script's first; write one script per training"
            )
        self.leave()
        self._join()
        self.show_members()

    # -- Accelerate's own state ----------------------------------------------------------------------------------------

    def show_members(self) -> None:
        """Set number, rank and device of this worker where Accelerate, its loggers and its trackers read them."""
        if self.left:
            return
        fleet, gpu = self.fleet, self.fleet.device.type == "cuda"
        kind = DistributedType.MULTI_GPU if gpu else DistributedType.MULTI_CPU
        local = int(self._local_rank) if self._local_rank.isdigit() else fleet.rank
        facts = {
            "distributed_type": kind if self.several else DistributedType.NO,
            "num_processes": fleet.world_size,
            "process_index": 0 if fleet.is_leader else max(1, fleet.rank),
            "local_process_index": local if self.context.elastic is None else fleet.rank,
            "device": fleet.device,
            "backend": "gloo" if self.several else None,
            "fleet": True,
        }
        if self.several and self._accelerator is not None:  # an attribute of the one state hides its class's method
            facts["wait_for_everyone"] = self._accelerator.wait_for_everyone
        if self.context.elastic is not None:
            facts["split_between_processes"] = refuse_split
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            if shared:
                shared.update(facts)

    # -- what the script has -------------------------------------------------------------------------------------------

    def track(self, kind: str, thing: Any) -> None:
        """Have an object saved, loaded and handed over, under a name with the number of its kind."""
        if id(thing) not in self._tracked:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._tracked[id(thing)] = f"{kind}{number}", thing  # held, so that no other gets its id
            self.fleet.track(**{f"{kind}{number}": thing})

    def take_seed(self, given: int | None) -> None:
        """Adopt the seed ``given`` for data, else torch's on the leader, as ``set_seed`` sets it, before a loop."""
        if self._seeded:
            return
        self._seeded = True
        if self.context.resume is None:
            seed = (torch.initial_seed() if given is None else given) % LONGEST_SEED
            self.context.seed = int(self.context.transport.gather("the seed", seed)[0])
            whose = "torch's on the leader" if given is None else "as DataLoaderConfiguration gives it"
            self.context.inform(f"the seed is {self.context.seed}, {whose}")
