"""What a transport is: who is in the fleet, how tensors are summed, and how small facts are agreed on.

Transports know no samples and no gradients. Every call below that involves others is numbered in one sequence,
the same on every worker, so that a worker that is somewhere else in the program can be named instead of hung on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from paceline import concurrency
from paceline.errors import GenerationOver, MisuseError
from paceline.transport.formats import Format

T = TypeVar("T")
Keeps = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]
"""The tensors of a round, or a function that makes them for the members of the round."""


def made(keeps: Keeps) -> list[torch.Tensor]:
    """Return the tensors of a round, made now where a function makes them."""
    return list(keeps() if callable(keeps) else keeps)


class Pending(Protocol):
    """A sum that is under way."""

    def wait(self) -> None:
        """Return when the tensor holds the fleet's sum; raise FleetError, naming the worker, when it never will."""

    def abandon(self) -> bool:
        """Nobody waits for it any more. False: it may still write into its tensor."""


class Collective(Protocol):
    """Workers that sum together and agree on small facts. What has a default is so where members never change."""

    solitary: bool = False
    """Nobody else can ever be there."""
    elastic: bool = False
    """Workers come and go: calls may end by `GenerationOver` and be made again among others."""
    grouped: bool = False
    """Workers were started as groups of processes, of one or more each."""
    shard: int = 0
    shards: int = 1
    """Which of the processes that are this worker, and of how many. The first is the fleet's member; the others, which
    make the same calls, hear from it what they gave."""
    rank: int
    size: int

    def once(self, label: str, call: Callable[[], T]) -> T:
        """What ``call`` gives or raises on the worker's first process, on all of them."""
        return call()

    def collect(self, label: str, value: T) -> list[T]:
        """On the worker's first process, all processes' values, by shard; on the others nothing."""
        return [value]

    def said(self, label: str, value: T) -> T:
        """The first process's value, on all of them."""
        return value

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        """Fill ``into`` with what is this process's of what the first one has: ``parts(shard)`` there."""
        into.copy_(parts(0))

    def tell(self, kind: str, content: Any = None) -> None:
        """On the first process, in the middle of `once`: have the others do what they have said `on` this kind."""
        return

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        """What to do when the first process tells so."""
        return

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros in memory that this worker's processes share."""
        return torch.zeros(size, dtype=dtype)

    def mesh(self) -> Any:
        """The worker's processes as torch.distributed knows them."""
        raise MisuseError(
            "this worker is one process, with nothing to shard a model over: start the run with `paceline run --group "
            "2`, or leave shard=True out"
        )

    def round(
        self, label: str, *, aside: bool = False, keeps: Keeps = ()
    ) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Everything summed inside belongs to one collective call with this label. ``aside``: it is one of the rounds
        with a deadline, which a thread of their own runs beside the user's calls. ``keeps``: the tensors that hold its
        result, for a worker that missed its end; they are left alone until the next call is over. A function that
        makes them is called inside, where rank and size are those of the round's members until it ends; the context
        gives the tensors."""

    def sum(self, tensor: torch.Tensor) -> Pending:
        """Start summing ``tensor`` over the fleet in place. All workers start the same sums in the same order."""

    def written_sum(self, tensor: torch.Tensor, form: Format) -> Pending | None:
        """The same where sums cross between places far from one another by one worker of each: there in this format.
        None: they do not."""
        return None

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        """Start an exchange of bytes on the CPU, in one order with the sums: row i of ``sent`` goes to the worker
        from which row i of ``got`` comes, the i-th in an order that is the same for all and in every exchange."""
        raise AssertionError("this transport exchanges no bytes")

    def deliver_members_changed(self) -> None:
        """Tell the training, before its next call, if the members changed; by whichever thread comes first."""
        return

    def gather(self, label: str, value: Any) -> list[Any]:
        """Every worker's (JSON) value, in rank order. ``value`` may be a function of nothing: where workers come and go
        it is asked again when the call is made again, among others than before."""

    def close(self, *, failure: BaseException | None = None) -> None:
        """Leave. With a failure, tell the others why first."""

    def cut(self, over: GenerationOver) -> None:
        """What is still under way in this generation ends now."""
        return

    def re_form_after(self, over: GenerationOver) -> None:
        """A call was cut short: re-form the group among those who live, and go on. Any thread may come here; one does
        the work."""
        raise over

    def given(self, into: Sequence[torch.Tensor], *, aside: bool = False) -> bool:
        """After `re_form_after`: whether others had finished the round under way; its result then stands in
        ``into``."""
        return False


class Transport(Collective, Protocol):
    """Reaches the other workers."""

    name: str
    backend: str
    outside: bool = False
    """This worker is not in the fleet (yet): its calls concern itself alone, until its first step."""
    leaving: bool = False
    """This worker was asked to leave, and does so after the step."""
    at_rest: bool = True
    """This worker is at no step: it may leave at once."""
    roster_away: bool = False
    """Signals do not come through: the roster, which keeps the store, is away."""
    generation: int
    workers: tuple[int, ...]
    """Stable identities in rank order."""
    calls: int
    """Collective calls that this worker's own thread has made. Who takes over another's place in the training takes
    over this number too."""

    @property
    def id(self) -> int:
        """Who this worker is, whatever its rank."""
        return self.rank

    def clock(self) -> float:
        """Unix seconds for the run's log, the same on every worker that may come to write it."""
        return concurrency.time()

    def places(self) -> dict[str, Any] | None:
        """Where the workers are, by site and computer, and what was measured between them (JSON); None: all on one
        computer."""
        return None

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        """Overwrite ``tensors`` with the leader's; ``inside``: on all processes of a worker, and not on the first
        alone."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a CPU tensor to one worker, which receives it under the same tag; from any thread."""

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fill a CPU tensor with what one worker sends; from any thread."""

    def slot(self, name: str) -> int:
        """A small number for ``name``, the same on every worker; given out on first use by anybody."""

    def slot_name(self, slot: int) -> str:
        """The name behind a slot that another worker asked for."""

    def doing(self, what: str, *, begun: int | None = None) -> None:
        """Note what this worker does now, for others to read when they wait for it; ``begun``: steps begun so far."""

    def signal(self, name: str) -> None:
        """Say ``name`` to the workers that wait for it."""

    def tally(self, name: str) -> int:
        """Say that one more worker has come to ``name``; returns how many have."""

    def heard(self, name: str) -> bool:
        """Whether somebody has said ``name``. From the thread of the rounds."""

    def forget(self, name: str) -> None:
        """Nobody will wait for ``name`` any more. From the thread of the rounds."""

    def release(self) -> None:
        """What a round aside gave is in the training's state: the training may hear who is there now."""
        return
