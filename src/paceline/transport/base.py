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
from paceline.transport.engines.contract import EngineWork
from paceline.transport.formats import Format

T = TypeVar("T")
RoundTensors = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]
"""The tensors of a round, or a function that makes them for the members of the round."""


def made(result: RoundTensors) -> list[torch.Tensor]:
    """Return the tensors of a round, made now where a function makes them."""
    return list(result() if callable(result) else result)


Renew = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A function that replaces tensors into which an abandoned sum may still write."""


def empty_ones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes, with other memory."""
    return [torch.empty_like(tensor) for tensor in tensors]


class Pending(Protocol):
    """A sum that is under way."""

    def wait(self) -> None:
        """Return when the tensor holds the fleet's sum; raise FleetError, naming the worker, when it never will."""

    def abandon(self) -> bool:
        """Give the sum up: nobody waits for it any more. False: it may still write into its tensor."""

    def forward(self) -> None:
        """Send on what the others need for their part in this sum, before anybody waits for the end of a sum."""
        return

    def unsent(self) -> EngineWork | None:
        """Return the engine's work if it may still go in one message with others."""
        return None

    def send_together(self, works: Sequence[EngineWork]) -> None:
        """Send these works, this sum's `unsent` one among them, in one message."""
        raise AssertionError("this sum has nothing that is unsent")


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
    make the same calls, receive from it what they gave."""
    rank: int
    size: int
    generation: int = 0
    """Number of the members' generation."""

    def once(self, label: str, call: Callable[[], T]) -> T:
        """Return, or raise, on all processes of a worker what ``call`` gives on the first."""
        return call()

    def collect(self, label: str, value: T) -> list[T]:
        """Return all processes' values, by shard, on the worker's first process; nothing on the others."""
        return [value]

    def from_first(self, label: str, value: T) -> T:
        """Return the first process's value on all of them."""
        return value

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        """Fill ``into`` with what is this process's of what the first one has: ``parts(shard)`` there."""
        into.copy_(parts(0))

    def relay(self, kind: str, content: Any = None) -> None:
        """Have the other processes do what they registered `on` this kind; on the first process, inside `once`."""
        return

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        """Register what to do when the first process relays this kind."""
        return

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros in memory that this worker's processes share."""
        return torch.zeros(size, dtype=dtype)

    def mesh(self) -> Any:
        """Return the worker's processes as a device mesh of torch.distributed."""
        raise MisuseError(
            "this worker is one process, with nothing to shard a model over: start the run with `paceline run "
            "--procs-per-worker 2`, or leave shard=True out"
        )

    def round(
        self, label: str, *, background: bool = False, result: RoundTensors = ()
    ) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Make one collective call, with this label, of everything that is summed inside.

        ``background``: another thread than the user's runs the round, because it has a deadline or overlaps with local
        steps. ``result``: the tensors that hold its result, for a worker that missed its end; they are left alone until
        the next call is over. A function that makes them is called inside, where rank and size are those of the round's
        members until it ends; the context gives the tensors.
        """

    def sum(self, tensor: torch.Tensor) -> Pending:
        """Start summing ``tensor`` over the fleet in place. All workers start the same sums in the same order."""

    def written_sum(self, tensor: torch.Tensor, wire_format: Format) -> Pending | None:
        """Start a sum that crosses between distant places in this format, by one worker of each place.

        None: sums of this transport cross no such places.
        """
        return None

    @property
    def sums_piecewise(self) -> bool:
        """Whether sums travel in pieces, over slow links, so that parts of a tensor may as well be sums of their own.

        The same on all workers of a generation, from its first sum to its last.
        """
        return False

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Pending:
        """Start an exchange of rows of bytes on the CPU, in one order with the sums.

        Row i of ``sent`` goes to the worker from which row i of ``got`` comes, the i-th in an order that is the same
        for all and in every exchange.
        """
        raise AssertionError("this transport exchanges no bytes")

    def deliver_members_changed(self) -> None:
        """Tell the training, before its next call, if the members changed; by whichever thread comes first."""
        return

    def gather(self, label: str, value: Any) -> list[Any]:
        """Return every worker's (JSON) value, in rank order.

        ``value`` may be a function of nothing: where workers come and go it is called again when the call is made
        again, among other members.
        """

    def close(self, *, failure: BaseException | None = None) -> None:
        """Leave; with a failure, publish it to the others first."""

    def recover(
        self,
        over: GenerationOver,
        sums: Sequence[Pending] = (),
        tensors: Sequence[torch.Tensor] = (),
        *,
        renew: Renew = empty_ones,
        background: bool = False,
    ) -> Sequence[torch.Tensor] | None:
        """Abandon the sums of a call that a change of members cut short, and re-form the group among those who live.

        Any thread may come here; one does the work. Returns the tensors that hold the call's result, when one of them
        had finished it and handed it over: ``tensors``, or what ``renew`` made where an abandoned sum may still write
        into these. None: the call is to be made again.
        """
        raise over


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
    since: int = 0
    """The first generation that this worker was in, where workers come and go."""
    roster_away: bool = False
    """Signals do not come through: the roster, which keeps the store, is away."""
    workers: tuple[int, ...]
    """Stable identities in rank order."""
    calls: int
    """Collective calls that this worker's own thread has made. Who takes over another's place in the training takes
    over this number too."""

    @property
    def id(self) -> int:
        """This worker's identity, which does not change with its rank."""
        return self.rank

    def clock(self) -> float:
        """Return Unix seconds for the run's log, the same on every worker that may come to write it."""
        return concurrency.time()

    def places(self) -> dict[str, Any] | None:
        """Return where the workers are, by site and computer, and what was measured between them (JSON).

        None: all are on one computer.
        """
        return None

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        """Overwrite ``tensors`` with the leader's.

        ``inside``: on all processes of a worker, and not on the first alone.
        """

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        """Send a CPU tensor to one worker of this generation, which receives it under the same tag; from any thread.

        Raises `GenerationOver` where the group of another generation stands: there the rank is another worker's.
        """

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        """Fill a CPU tensor with what one worker of this generation sends, as in `send`."""

    def slot(self, name: str) -> int:
        """Return a small number for ``name``, the same on every worker; given out on first use by anybody."""

    def slot_name(self, slot: int) -> str:
        """Return the name behind a slot that another worker asked for."""

    def doing(self, what: str, *, begun: int | None = None) -> None:
        """Note what this worker does now, for others to read when they wait for it; ``begun``: steps begun so far."""
        return

    def signal(self, name: str) -> None:
        """Signal ``name`` to the workers that wait for it."""
        return

    def tally(self, name: str, by: int = 1) -> int:
        """Add ``by`` to the number of workers that have come to ``name``, and return that number."""

    def was_signalled(self, name: str) -> bool:
        """Return whether somebody has signalled ``name``. From the thread of the rounds."""

    def forget(self, name: str) -> None:
        """Forget ``name``, for which nobody will wait any more. From the thread of the rounds."""
        return

    def release(self) -> None:
        """Let the training receive news of members: what a background round gave is in its state."""
        return
