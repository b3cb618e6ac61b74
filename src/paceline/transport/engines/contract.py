"""The contract of an engine, which sums and sends the tensors of one group, and of the works that it starts.

A `paceline.transport.group.Group` uses nothing else of what carries its sums. An engine's ranks are positions in the
order of its group's topology, and not the ranks that the training sees. An engine may stand around another one
(`EngineAround`) and take over some of its sums. `paceline.transport.engines` lists the kinds by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from paceline.transport.formats import Format
from paceline.transport.network import Store

CHECK_S = 0.5
"""Seconds between two looks at whether a work that is waited for can still end."""
CLOSE_S = 3.0
"""How long a thread whose connections are shut may take to end."""
CLOSED = "the group is not formed, or closed"

STATE_TAGS = 1 << 29
PROBE_TAG = STATE_TAGS - 16
SUM_TAGS = 1 << 30
LANE_TAGS = 1 << 29
"""Tags of messages between two workers of one group. No two messages under way between them may share a tag:

    from          to              message
    0                             a copy of a peer's state: two per step (step/late/catch_up.py); before that, while the
                                  group is settled, tensors of a result (transport/elastic/handover.py)
    PROBE_TAG     PROBE_TAG + 1   probes of a link's speed, before anything else (transport/survey.py)
    STATE_TAGS    SUM_TAGS        pieces of a newcomer's state (transport/elastic/handover.py)
    SUM_TAGS + lane * LANE_TAGS   sums of a lane, 0 or 1: the first half of `LANE_TAGS` for small sums, the second for
                                  pieces of sums over the tree
"""

Check = Callable[[], None]
"""Raises when what is waited for can never end."""
Closer = Callable[[], None]
"""Frees a part of a closed engine, perhaps slowly, when it is called and dropped."""


class Held:
    """Keeps objects alive until it is called: a message that is freed while it is on its way is cancelled."""

    def __init__(self, *objects: Any) -> None:
        self._objects = objects

    def __call__(self) -> None:
        self._objects = ()


class Carrier(Protocol):
    """What sends several works in one message."""

    def exchange(self, works: Sequence[Any]) -> None:
        """Send these off together."""


class EngineWork(Protocol):
    """One operation under way."""

    def wait(self, check: Check) -> None:
        """Return when the operation is done; raise RuntimeError when the engine failed.

        ``check`` is called about every `CHECK_S` seconds; when it raises, the wait ends with its error.
        """

    def abandon(self) -> bool:
        """Give the operation up: nobody waits for it any more. False: it may still write into its tensor."""

    @property
    def done(self) -> bool:
        """Whether the operation is known to have ended, well or not: a wait for it returns, or raises, at once."""

    def leavable(self) -> EngineWork:
        """Return this work in a form whose `wait` keeps its promise to ``check``, at the price of some microseconds."""
        return self

    @property
    def carrier(self) -> Carrier | None:
        """What may send this work in one message with others; None once it is under way."""
        return None


class Engine(Protocol):
    """Connects the workers of one group. A failed operation may have written anything into its tensor."""

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        """Start to overwrite ``tensor`` with the sum of all workers' tensors, the same bits everywhere."""

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> EngineWork:
        """Start to exchange rows: row i of ``sent`` becomes this worker's row in worker i's ``got``."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> EngineWork:
        """Start to overwrite ``tensor`` with that of rank ``root``."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EngineWork:
        """Start to send ``tensor``, which must not change until the work is done."""

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> EngineWork:
        """Start to receive; messages with one source and tag arrive in the order in which they were sent."""

    def abort(self) -> None:
        """Break off what is under way: it fails within milliseconds. Any thread may call it, also after `close`."""

    def close(self) -> list[Closer]:
        """Give up the engine: nothing starts in it any more. Returns, once, what frees its resources, in order."""

    # The methods below are optional: their defaults suit most engines.

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether this engine sums such a tensor itself: engines around it then leave the tensor to it."""
        return False

    def sum_in(self, tensor: torch.Tensor, wire_format: Format) -> EngineWork | None:
        """Start a sum that crosses between distant places in a format; None where this engine has no such sums."""
        return None

    def round_is_over(self) -> None:
        """Note that everybody has come to this round, and so has received what was sent before it."""
        return

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        """Return where the network does not pass: ranks, their address, and the seconds since an answer came."""
        return []

    def lost(self) -> bool:
        """Return whether a connection to another worker is broken, so that no operation of the group can end."""
        return False


class EngineAround(Engine):
    """An engine around another one, ``inner``, to which it leaves what it does not do itself."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def sum(self, tensor: torch.Tensor) -> EngineWork:
        return self.inner.sum(tensor)

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> EngineWork:
        return self.inner.all_to_all(sent, got)

    def broadcast(self, tensor: torch.Tensor, root: int) -> EngineWork:
        return self.inner.broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> EngineWork:
        return self.inner.send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> EngineWork:
        return self.inner.receive(tensor, source, tag)

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> list[Closer]:
        """Close both: what this one holds is freed first, for it may need the other."""
        own, inner = self._close_own(), self.inner.close()
        return [*own, *inner] if inner else []

    def _close_own(self) -> list[Closer]:
        return []

    def takes(self, tensor: torch.Tensor) -> bool:
        return self.inner.takes(tensor)

    def sum_in(self, tensor: torch.Tensor, wire_format: Format) -> EngineWork | None:
        return self.inner.sum_in(tensor, wire_format)

    def round_is_over(self) -> None:
        self.inner.round_is_over()

    def unanswered(self) -> list[tuple[list[int], str, float]]:
        return self.inner.unanswered()

    def lost(self) -> bool:
        return self.inner.lost()


# -- kinds of engines ----------------------------------------------------------------------------------------------


def at_once(make: Callable[[], Any]) -> Any:
    return make()


@dataclass(frozen=True)
class Meeting:
    """The meeting of a group's workers who connect an engine, and what each brings."""

    store: Store
    """This group's own keys."""
    rank: int
    size: int
    towards: tuple[str, int]
    """The address where the fleet meets, or one of this computer."""
    device: torch.device
    spare_port: int = 0
    """The store's, whose connections an abort leaves alone."""
    channels: int = 1
    """How many sums may travel side by side, the same for all workers."""
    forming: timedelta | None = None
    """How long the others may take to connect, all of them being there; None: as long as they need."""
    patiently: Callable[[Callable[[], Any]], Any] = at_once
    """Makes a call that cannot be broken off, and raises when the group that is being formed is given up."""


Facts = Sequence[Mapping[str, Any]]
"""The facts that each worker of a group has published of itself, by rank."""


class EngineKind:
    """A kind of engine, as the registry lists it."""

    name: str
    """What PACELINE_BACKEND calls it."""
    needs_gpus: bool = False
    """Whether every worker must have a GPU."""

    def suits(self, facts: Facts) -> bool:
        """Return whether a fleet of these workers takes this kind when nobody asks for one."""
        return False

    def connect(self, meeting: Meeting) -> tuple[Engine, str]:
        """Connect all workers of a group, who come here; returns this one's engine, and a description for the log."""
        raise NotImplementedError

    def warm_up(self, device: torch.device) -> None:
        """Load what takes long, so that nobody waits for it when this worker enters a group."""
        return
