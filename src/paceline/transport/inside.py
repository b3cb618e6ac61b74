"""The processes of one worker: its first process, the *head*, and the others, its *followers*.

The head alone is a member of the fleet. Followers run the same script and make the same calls, and what a call gave on
the head, they hear from it. So every message belongs to a call, by its label: one that belongs to another call shows
that the script went another way in one of the processes.

They find each other in `meet`, and form the process group in which they shard a model. ``paceline run
--procs-per-worker`` says in variables which process of which worker this is. Under torchrun, PACELINE_PROCS_PER_WORKER
alone says how many consecutive ranks make a worker.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from paceline import concurrency
from paceline.errors import CallMismatch, FleetError, PacelineError
from paceline.roster import Generation
from paceline.transport.base import Pending, RoundTensors, Transport, made
from paceline.transport.elastic.changes import MembershipChange, MembershipListener
from paceline.transport.elastic.handover import bytes_of
from paceline.transport.fixed import meeting_store
from paceline.transport.network import dist, loopback_only

PIECE = 1 << 24
"""Bytes of a tensor that are sent at a time."""
RETRY_S = 0.02
MEET_S = 120.0
"""How long the processes of a worker may be apart in starting."""


def accept(socket: Path, followers: int) -> list[Connection]:
    """Wait, in the head, for its followers at this path; return their connections, by shard."""
    links: dict[int, Connection] = {}
    with Listener(str(socket), family="AF_UNIX", backlog=max(1, followers)) as listener:
        while len(links) < followers:
            link = listener.accept()
            links[link.recv()] = link
    return [links[shard] for shard in sorted(links)]


def connect(socket: Path, shard: int, *, wait: Callable[[], None]) -> Connection:
    """Connect a follower to its head; ``wait`` waits a moment, and raises when that has lasted too long."""
    while True:
        try:
            link = Client(str(socket), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            wait()
            continue
        link.send(shard)
        return link


class Links:
    """This process's connections: the head's to all followers, or a follower's to the head."""

    def __init__(self, links: Sequence[Connection], *, shard: int) -> None:
        self._links, self._shard = list(links), shard

    def send(self, label: str, kind: str, content: Any = None) -> None:
        message = pickle.dumps((label, kind, content))  # tensors by value
        for link in self._links:
            self._guarded(lambda link=link: link.send_bytes(message))  # type: ignore[misc]

    def receive(self, label: str) -> list[tuple[str, Any]]:
        """Receive a message of this call by each connection: its kind and content."""
        return [self._one(label, link) for link in self._links]

    def _one(self, label: str, link: Connection) -> tuple[str, Any]:
        theirs, kind, content = pickle.loads(self._guarded(link.recv_bytes))
        if theirs != label:
            raise CallMismatch(
                f"one process of this worker is in {label} and another in {theirs}: every process of a worker must "
                "make the same calls in the same order (decide by what is the same in all, never by fleet.is_leader)"
            )
        return str(kind), content

    def send_tensor(self, tensor: torch.Tensor, *, to: int | None = None) -> None:
        """Send a tensor, whatever its size, by every connection, or to one follower."""
        links = self._links if to is None else [self._links[to - 1]]
        array: Any = bytes_of(tensor).numpy()
        data = memoryview(array)
        for at in range(0, len(data), PIECE):
            for link in links:
                self._guarded(lambda link=link, at=at: link.send_bytes(data[at : at + PIECE]))  # type: ignore[misc]

    def receive_tensor(self, tensor: torch.Tensor) -> None:
        """Receive into a tensor of the size of the one sent; a follower's."""
        data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        array: Any = data.numpy()
        view, (link,) = memoryview(array), self._links
        for at in range(0, len(view), PIECE):
            self._guarded(lambda at=at: link.recv_bytes_into(view[at : at + PIECE]))  # type: ignore[misc]
        with torch.no_grad():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError):
            who = "the first process of this worker" if self._shard else "another process of this worker"
            raise FleetError(f"{who} has ended") from None


class SharedTensor:
    """A tensor of zeros in memory that the processes of a worker share.

    The head makes it, followers open it by its ``path``. It has no name in any folder, so nothing of it is left when
    they end, whatever they die of.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        length = max(1, size) * dtype.itemsize
        self._file = os.memfd_create("paceline")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        os.truncate(self._file, length)
        self.tensor = opened(self.path, size, dtype)

    def all_have_it(self) -> None:
        """Remove the name, once everybody has opened the tensor: it lives as long as somebody uses it."""
        os.close(self._file)


def opened(path: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that another process has made."""
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def portable(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """Return an error in parts that can be sent, whatever its constructor takes."""
    known = isinstance(error, (PacelineError, ValueError, TypeError, OSError, SystemExit, KeyboardInterrupt))
    plain = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, float))}
    return (type(error), error.args, plain) if known else (FleetError, (f"{type(error).__name__}: {error}",), {})


def rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """Return the error again, without calling its own constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    if isinstance(error, SystemExit):
        error.code = args[0] if args else None
    return error


T = TypeVar("T")

ANSWER, ERROR, VALUE, STATE = "answer", "error", "value", "state"
SHOWN = ("rank", "size", "workers", "generation", "outside", "calls", "backend", "id")
"""The transport's attributes that followers receive after each call, as they are on the head."""
OWN = ("_real", "_links", "_label", "shards", "mesh")


class Head:
    """A transport whose calls are a whole worker's. What is not here is the transport's own."""

    shard = 0
    grouped = True
    solitary = False
    """Sums are made even where nobody else is there: the followers' parts come together for them."""

    def __init__(self, real: Any, links: Links, *, shards: int, mesh: Callable[[], Any]) -> None:
        self._real, self._links, self._label, self.shards, self.mesh = real, links, "", shards, mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        elif name == "listener":
            self._real.listener = None if value is None else RelayedListener(value, self)
        else:
            setattr(self._real, name, value)

    # -- inside the worker -----------------------------------------------------------------------------------------

    def once(self, label: str, call: Callable[[], T]) -> T:
        with self._answered(label) as answer:
            answer.append(call())
        result: T = answer[0]
        return result

    @contextmanager
    def _answered(self, label: str) -> Iterator[list[Any]]:
        """Send followers what the block puts into the list, or raises: they get it from the same call."""
        outer, self._label = self._label, self._label or label
        answer: list[Any] = []
        try:
            yield answer
        except BaseException as error:
            if not outer:
                with suppress(FleetError):  # they may be gone, and that be the error
                    self._send_state()
                    self._links.send(label, ERROR, portable(error))
            raise
        else:
            if not outer:
                self._send_state()
                self._links.send(label, ANSWER, answer[0] if answer else None)
        finally:
            self._label = outer

    def _send_state(self) -> None:
        self._links.send(self._label, STATE, {name: getattr(self._real, name, None) for name in SHOWN})

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        return

    def relay(self, kind: str, content: Any = None) -> None:
        self._links.send(self._label, kind, content)

    def collect(self, label: str, value: T) -> list[T]:
        return [value, *(content for _, content in self._links.receive(self._label or label))]

    def from_first(self, label: str, value: T) -> T:
        self._links.send(self._label or label, VALUE, value)
        return value

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        for shard in range(1, self.shards):
            self._links.send_tensor(parts(shard), to=shard)
        into.copy_(parts(0))

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        made = SharedTensor(size, dtype)
        self.from_first(label, made.path)
        self.collect(label, None)
        made.all_have_it()
        return made.tensor

    # -- calls of the fleet ----------------------------------------------------------------------------------------

    def gather(self, label: str, value: Any) -> list[Any]:
        def asked() -> Any:
            self.relay(VALUE)
            return value()

        return self.once(label, lambda: list(self._real.gather(label, asked if callable(value) else value)))

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        self.once("the leader's broadcast", lambda: self._real.broadcast(tensors))
        for tensor in tensors if inside else ():
            self._links.send_tensor(tensor)

    def slot_name(self, slot: int) -> str:
        return self.once("the name of a figure", lambda: str(self._real.slot_name(slot)))

    def deliver_members_changed(self) -> None:
        self.once("who is there", self._real.deliver_members_changed)

    def re_form(self) -> None:
        self.once("re-forming the group", self._real.re_form)

    def take_over_later(self) -> bool:
        return self.once("taking over a state", lambda: bool(self._real.take_over_later()))

    def depart(self, *, agreed: bool) -> None:
        self.once("leaving", partial(self._real.depart, agreed=agreed))

    @property
    def loop(self) -> RelayedLoop:
        return RelayedLoop(self._real.loop, self)

    def close(self, *, failure: BaseException | None = None) -> None:
        try:
            if failure is None:
                self.once("the end", self._real.close)
            else:
                self._real.close(failure=failure)
        finally:
            self._links.close()


class RelayedLoop:
    """The loop of the script that the fleet is in: followers receive the head's answers."""

    def __init__(self, real: Any, head: Head) -> None:
        self._real, self._head = real, head

    @property
    def number(self) -> int:
        return int(self._real.number)

    def begin(self, number: int, call_results: str) -> None:
        self._real.begin(number, call_results)

    def of_fleet(self) -> int:
        return self._head.once("the fleet's loop", lambda: int(self._real.of_fleet()))

    def call_results_of_fleet(self) -> str:
        return self._head.once("what the fleet's calls returned", lambda: str(self._real.call_results_of_fleet()))


class RelayedListener:
    """The head's training as a listener of the transport; its calls are relayed to the followers' trainings."""

    def __init__(self, listener: MembershipListener, head: Head) -> None:
        self._listener, self._head = listener, head

    def facts(self) -> Any:
        return self._listener.facts()

    def members_changed(self, change: MembershipChange, show: Callable[[], None]) -> None:
        self._head.relay("members_changed", (self._head.id, change))
        self._listener.members_changed(change, show)

    def held(self) -> Collection[str]:
        return self._listener.held()

    def give_state(self, held: Collection[str]) -> Sequence[torch.Tensor]:
        self._head.relay("give_state")
        return self._listener.give_state(held)

    def take_over(self, data: list[torch.Tensor], change: MembershipChange) -> bool:
        self._head.relay("take_over", (self._head.id, change))
        return self._listener.take_over(data, change)


class Follower(Transport):
    """The transport of a process that is no member of the fleet, but a part of one."""

    name = "follower"
    grouped = True
    rank, size, generation, calls = 0, 1, 0, 0
    workers: tuple[int, ...] = (0,)
    backend = "none"

    def __init__(self, links: Links, *, shard: int, shards: int, mesh: Callable[[], Any], elastic: bool) -> None:
        self._links, self.shard, self.shards, self._mesh, self.elastic = links, shard, shards, mesh, elastic
        self._id = 0
        self.listener: MembershipListener | None = None
        self.intact: Callable[[], bool] = lambda: True
        self.lanes = SimpleNamespace(rounds=0)
        self.loop = FollowedLoop(self)
        self._label = ""
        self._handlers: dict[str, Callable[[Any], None]] = {}

    @property
    def id(self) -> int:
        return self._id

    # -- inside the worker -----------------------------------------------------------------------------------------

    def once(self, label: str, call: Callable[[], T]) -> T:
        return cast(T, self._follow(label))

    def _follow(self, label: str, *, value: Callable[[], Any] | None = None) -> Any:
        """Follow the head's messages until its call is over."""
        outer, self._label = self._label, self._label or label
        try:
            while True:
                ((kind, content),) = self._links.receive(label)
                if kind == ANSWER:
                    return content
                if kind == ERROR:
                    raise rebuilt(*content)
                if kind == VALUE:
                    assert value is not None
                    value()
                else:
                    self._do(kind, content)
        finally:
            self._label = outer

    def _do(self, kind: str, content: Any) -> None:
        if kind == STATE:
            self._id = content.pop("id")
            vars(self).update(content)
        elif kind in self._handlers:
            self._handlers[kind](content)
        elif kind == "members_changed" and self.listener is not None:
            self._id, change = content
            self.listener.members_changed(change, partial(self._show, change.generation))
        elif kind == "give_state" and self.listener is not None:
            self.listener.give_state(())
        elif kind == "take_over" and self.listener is not None:
            self._id, change = content
            self._show(change.generation)
            self.listener.take_over([], change)  # its content comes from the head
        else:
            raise FleetError(f"a process of this worker heard {kind!r}, which is not for it")

    def _show(self, generation: Generation) -> None:
        self.workers, self.generation = generation.workers, generation.number
        self.rank, self.size = self.workers.index(self._id), len(self.workers)

    def mesh(self) -> Any:
        return self._mesh()

    def on(self, kind: str, do: Callable[[Any], None]) -> None:
        self._handlers[kind] = do

    def collect(self, label: str, value: T) -> list[T]:
        self._links.send(self._label or label, VALUE, value)
        return []

    def from_first(self, label: str, value: T) -> T:
        ((_, theirs),) = self._links.receive(self._label or label)
        return cast(T, theirs)

    def part(self, label: str, parts: Callable[[int], torch.Tensor], into: torch.Tensor) -> None:
        self._links.receive_tensor(into)

    def shared(self, label: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = opened(self.from_first(label, ""), size, dtype)
        self.collect(label, None)
        return tensor

    # -- calls of the fleet ----------------------------------------------------------------------------------------

    def round(
        self, label: str, *, background: bool = False, result: RoundTensors = ()
    ) -> AbstractContextManager[Sequence[torch.Tensor]]:
        return nullcontext(made(result))

    def sum(self, tensor: torch.Tensor) -> Pending:
        raise AssertionError("a follower's sums are its head's")

    def gather(self, label: str, value: Any) -> list[Any]:
        return list(self._follow(label, value=value if callable(value) else None))

    def broadcast(self, tensors: Sequence[torch.Tensor], *, inside: bool = True) -> None:
        self._follow("the leader's broadcast")
        for tensor in tensors if inside else ():
            self._links.receive_tensor(tensor)

    def slot_name(self, slot: int) -> str:
        return str(self._follow("the name of a figure"))

    def deliver_members_changed(self) -> None:
        self._follow("who is there")

    def re_form(self) -> None:
        self._follow("re-forming the group")

    def take_over_later(self) -> bool:
        return bool(self._follow("taking over a state"))

    def depart(self, *, agreed: bool) -> None:
        self._follow("leaving")

    def slot(self, name: str) -> int:
        raise AssertionError("a follower names no figures")

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a follower sends nothing to other workers")

    def receive(self, tensor: torch.Tensor, source: int, tag: int, *, generation: int) -> None:
        raise AssertionError("a follower receives nothing from other workers")

    def tally(self, name: str, by: int = 1) -> int:
        return 0

    def was_signalled(self, name: str) -> bool:
        return False

    def close(self, *, failure: BaseException | None = None) -> None:
        try:
            if failure is None:
                self._follow("the end")
        finally:
            self._links.close()


class FollowedLoop:
    """The loop of the script that the fleet is in, as the head reports it."""

    number = 0

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def begin(self, number: int, call_results: str) -> None:
        self.number = number

    def of_fleet(self) -> int:
        return self._follower.once("the fleet's loop", lambda: 0)

    def call_results_of_fleet(self) -> str:
        return self._follower.once("what the fleet's calls returned", lambda: "")


MESH, JOINING = "shard", "joining"
_JOINS, _RANKED = count(), count()
"""A script may join several times: each time the processes of a worker meet elsewhere."""


@dataclass(frozen=True)
class ShardPosition:
    """The position of one process: the ``shard``-th of ``shards`` that are a worker, which meet in ``folder``."""

    shard: int
    shards: int
    folder: Path
    ranked: tuple[int, int] | None = None
    """Under torchrun: the worker's rank, and how many workers there are."""


def position_from_env(at_the_end: ExitStack) -> ShardPosition | None:
    """Return this process's position in its worker; None: a worker is one process.

    What is made for the worker is undone ``at_the_end``.
    """
    if (text := os.environ.get("PACELINE_PROCS_PER_WORKER")) is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"PACELINE_PROCS_PER_WORKER is {text!r}; it is the number of processes of a worker, such as 2")
    shards = int(text)
    if "PACELINE_SHARD" in os.environ and "PACELINE_GROUP_DIR" in os.environ:
        return ShardPosition(int(os.environ["PACELINE_SHARD"]), shards, Path(os.environ["PACELINE_GROUP_DIR"]))
    return _by_rank(shards, at_the_end)


def _by_rank(shards: int, at_the_end: ExitStack) -> ShardPosition:
    """Make consecutive ranks of a launcher without groups one worker."""
    if "RANK" not in os.environ:
        raise ValueError(
            "PACELINE_PROCS_PER_WORKER is set by hand: start with `paceline run --procs-per-worker N`, or with torchrun"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % shards or here % shards:
        raise ValueError(
            f"PACELINE_PROCS_PER_WORKER={shards}: the {here} processes of this computer do not make whole groups of "
            f"{shards}; start a multiple of {shards} on each computer"
        )
    worker, shard = divmod(rank, shards)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, key = meeting_store(), f"paceline/inside/{restart}/{next(_RANKED)}/{worker}"
    if shard == 0:
        folder = at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="paceline-group-"))
        store.set(key, folder)
    else:
        folder = store.get(key).decode()
    return ShardPosition(shard, shards, Path(folder), (worker, world // shards))


def meet(position: ShardPosition, device: torch.device, *, elastic: bool, join: Callable[[], Transport]) -> Transport:
    """Return this process's transport: the head joins the fleet, followers follow it."""
    number = next(_JOINS)
    socket = position.folder / f"head{number}"
    if position.shard == 0:
        links = Links(accept(socket, position.shards - 1), shard=0)
    else:
        links = Links([connect(socket, position.shard, wait=_Patience())], shard=position.shard)
    _check_devices(_everybodys(links, str(device), first=position.shard == 0))
    _form(position, device, number)
    how: Any = {"shards": position.shards, "mesh": lambda: _mesh(device, position.shards)}
    if position.shard == 0:
        head = Head(join(), links, **how)
        head.once(JOINING, lambda: None)
        return cast(Transport, head)
    if concurrency.current_thread() is concurrency.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # the head decides, and its followers end with it
            signal.signal(number, signal.SIG_IGN)
    follower = Follower(links, shard=position.shard, elastic=elastic, **how)
    follower.once(JOINING, lambda: None)
    return follower


class _Patience:
    """Waits for the head to be there, but not for ever."""

    def __init__(self) -> None:
        self._until = concurrency.monotonic() + MEET_S

    def __call__(self) -> None:
        if concurrency.monotonic() > self._until:
            raise FleetError("the first process of this worker did not come to paceline.join()")
        concurrency.sleep(RETRY_S)


def _form(position: ShardPosition, device: torch.device, number: int) -> None:
    """Make torch.distributed's default group the worker: `fully_shard` uses it."""
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed's default group is initialised already, and in a worker of several processes it is the "
            "worker's own: leave init_process_group out"
        )
    store = dist.FileStore(str(position.folder / f"store{number}"), position.shards)
    with loopback_only():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # Gloo cannot gather on GPUs
        dist.init_process_group(backend, store=store, rank=position.shard, world_size=position.shards)


def _everybodys(links: Links, own: str, *, first: bool) -> list[str]:
    """Return the devices of a worker's processes, on each of them."""
    if not first:
        links.send(JOINING, "device", own)
        return list(links.receive(JOINING)[0][1])
    found = [own, *(str(theirs) for _, theirs in links.receive(JOINING))]
    links.send(JOINING, "devices", found)
    return found


def _check_devices(devices: Sequence[str]) -> None:
    """Raise ValueError unless the processes of a worker have a GPU each, or none has one.

    PACELINE_BACKEND=nccl: NCCL is set up to share one.
    """
    gpus = [device for device in devices if device.startswith("cuda")]
    if gpus and len(gpus) < len(devices):
        raise ValueError(
            f"the processes of a worker go through the model together, and these have {', '.join(devices)}: give each "
            "a GPU, or all the CPU (--devices)"
        )
    if len(set(gpus)) < len(gpus) and os.environ.get("PACELINE_BACKEND", "").lower() != "nccl":
        raise ValueError(
            f"processes of a worker share a GPU ({', '.join(devices)}), where NCCL cannot join them: give each its own "
            "with --devices, or all the CPU, or start smaller groups"
        )


def _mesh(device: torch.device, shards: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # takes a while to import, and few need it

    return init_device_mesh(device.type, (shards,), mesh_dim_names=(MESH,))


def leave_group() -> None:
    """End the worker's process group with the worker."""
    if dist.is_initialized():
        dist.destroy_process_group()
