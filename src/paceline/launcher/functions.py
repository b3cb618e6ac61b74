"""The launcher ``paceline.launch(fn, workers=4)``, which runs a function in worker processes on this computer.

It is meant for notebooks and tests. A function that a new process can import is run in new processes (spawn). One that
is defined in a notebook or inside another function cannot be imported, so this process is copied instead (fork). That
must happen before the process uses CUDA, which does not work in a copy. A copy has one thread, because a copied pool of
OpenMP threads waits for ever. The worker's side is `work`: it sets its process up, runs the function, and reports how
the function ended.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline import concurrency
from paceline.errors import FLEET_FAILED, FleetError, WorkerFailed, describe_exit
from paceline.launcher.fixed_fleet import ELASTIC_VARIABLES, RendezvousStore
from paceline.launcher.pool import INTERRUPT_GRACE_S, TERM_GRACE_S, TICK_S
from paceline.launcher.process_group import GROUP_VARIABLES
from paceline.launcher.supervise import loopback, worker_settings
from paceline.launcher.worker_process import end_with_parent
from paceline.renamed import names_present_keywords

GRACE_S = 6.0
"""Time that workers have to end by themselves after a failure, or after all have reported."""


@names_present_keywords
def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int,
    devices: Sequence[str] | None = None,
    pace: str | None = None,
    combine: str | None = None,
    comm_dtype: str | None = None,
    emulate: str | None = None,
    sample_ms: float | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    method: str | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` in ``workers`` processes on this computer, where ``paceline.join()`` makes them one fleet.

    Returns the functions' results, in rank order. When a worker fails, all are ended and `WorkerFailed` is raised with
    the traceback of the worker that failed first. Ctrl-C ends all of them.

    Args:
        fn: the function that every worker runs.
        *args: its arguments.
        workers: the number of worker processes.
        devices: one per worker, such as ``["cuda:0", "cpu"]``.
        pace: the pace, as the option of ``paceline run``; it overrides what the function asks for.
        combine: how workers combine their work, in the same way.
        comm_dtype: the format in which gradients or parameters travel, in the same way.
        emulate: the machines to emulate, as ``paceline run --emulate``.
        sample_ms: milliseconds per sample on an emulated machine of speed 1.
        name: the run's name in its log; the function's name unless given.
        run_dir: the run's folder; ``runs/<time>-<name>`` unless given.
        env: further environment variables for the workers.
        method: "spawn" (new processes) or "fork" (copies of this one); chosen by where the function is defined unless
            given.
    """
    _check(fn, workers, devices)
    method = method or choose_method(fn, args)
    if method not in ("spawn", "fork"):
        raise ValueError(f'method must be "spawn" or "fork", got {method!r}')
    if method == "fork":
        _check_fork()
    settings = worker_settings(
        name=name or getattr(fn, "__name__", "run"),
        run_dir=None if run_dir is None else Path(run_dir).resolve(),
        pace=pace,
        combine=combine,
        comm_dtype=comm_dtype,
        emulate=emulate,
        sample_ms=None if sample_ms is None else f"{sample_ms:g}",
    )
    with closing(RendezvousStore()) as store:
        pool = FunctionPool(store, method)
        try:
            for rank in range(workers):
                device = {} if devices is None else {"PACELINE_DEVICE": str(devices[rank])}
                pool.start(fn, args, {**settings, **(env or {}), **device, **store.environment(rank, workers)})
            store.start()
            return pool.results()
        except KeyboardInterrupt:
            pool.interrupt()
            raise
        finally:
            pool.end()


def choose_method(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return "spawn" when a new process can import the function and receive its arguments, else "fork"."""
    main = sys.modules["__main__"]
    inner = fn.func if isinstance(fn, partial) else fn
    file = getattr(main, "__file__", None)
    if file is not None and not os.path.exists(file):  # a script from standard input: a new process would look for it
        return "fork"
    interactive = hasattr(sys, "ps1") or "get_ipython" in vars(main) or file is None
    if getattr(inner, "__module__", None) == "__main__" and interactive:
        return "fork"
    try:
        pickle.dumps((fn, args))
    except Exception:  # a function within a function, or an argument that only this process has
        return "fork"
    return "spawn"


def _check(fn: Any, workers: int, devices: Sequence[str] | None) -> None:
    if not callable(fn):
        raise ValueError(f"paceline.launch takes a function, got {type(fn).__name__}: launch(train, workers=4)")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers must be a whole number, 1 or more, got {workers!r}")
    if devices is not None and (isinstance(devices, str) or len(devices) != workers):
        raise ValueError(f"devices must be a list with one for each of the {workers} workers, got {devices!r}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "paceline.launch ran again while a worker imported this script: put the call under if __name__ == "
            '"__main__":'
        )
    if "RANK" in os.environ or "PACELINE_ROSTER" in os.environ:
        raise ValueError(
            "paceline.launch in a process that is a worker already (a launcher has set RANK): call the function "
            "itself, or start the script with python"
        )


def _check_fork() -> None:
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized():
        raise ValueError(
            "this process uses CUDA, so it cannot be copied into workers: restart the notebook and call "
            "paceline.launch before anything touches the GPU, or put the function into a file and import it from there"
        )


class FunctionPool:
    """The worker processes of one launch."""

    def __init__(self, store: RendezvousStore, method: str) -> None:
        self._store, self._context = store, multiprocessing.get_context(method)
        self._processes: list[Any] = []
        self._readers: list[Connection] = []
        self._reports: dict[int, FunctionReport] = {}
        self._ended: set[int] = set()
        self._failures: list[FunctionReport] = []
        """Reports of failures, in the order of their arrival."""

    def start(self, fn: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]) -> None:
        reader, writer = multiprocessing.Pipe(duplex=False)
        forked = self._context.get_start_method() == "fork"
        order = (fn, tuple(args)) if forked else pickle.dumps((fn, tuple(args)))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=partial(work, leave=self._leave) if forked else work,
            args=(order, dict(environment), writer, os.getpid()),
            name=f"paceline worker {len(self._processes)}",
        )
        self._readers.append(reader)
        with warnings.catch_warnings(), _one_hash_seed():
            # Python 3.12 warns of copying a process with threads: see the docstring above
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        self._processes.append(process)
        writer.close()

    def _leave(self) -> None:
        """Close what belongs to the parent; called in a fork."""
        self._store.close()
        for reader in self._readers:
            reader.close()

    # -- while they run --------------------------------------------------------------------------------------------

    def results(self) -> list[Any]:
        """Return the functions' results, in rank order; raise WorkerFailed when one has failed."""
        until = None
        while len(self._ended) < len(self._processes):
            self._listen()
            self._notice_ends()
            if until is None and (self._failures or len(self._reports) == len(self._processes)):
                until = concurrency.monotonic() + GRACE_S
            if until is not None and concurrency.monotonic() > until:
                break
        if self._failures:
            raise self._explain()
        return [pickle.loads(self._reports[rank].value) for rank in range(len(self._processes))]

    def _listen(self) -> None:
        for reader in wait([r for r in self._readers if not r.closed], TICK_S):
            assert isinstance(reader, Connection)
            self._read(self._readers.index(reader))

    def _read(self, rank: int) -> None:
        try:
            report = self._readers[rank].recv()
        except (EOFError, OSError):
            self._readers[rank].close()
            if rank not in self._ended:
                concurrency.sleep(TICK_S)  # its end is noticed next
            return
        self._reports[rank] = report
        if report.error is not None:
            self._failures.append(report)

    def _notice_ends(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank in self._ended or not _over(process.pid):
                continue
            self._kill(process)  # what it started, before its number can be anybody else's
            if not self._readers[rank].closed and self._readers[rank].poll():
                self._read(rank)
            process.join()
            self._ended.add(rank)
            if rank not in self._reports:
                self._failed_silently(rank, process.exitcode)

    def _failed_silently(self, rank: int, code: int) -> None:
        self._store.announce_death(rank, describe_exit(code))
        self._reports[rank] = FunctionReport(
            rank, error=f"worker {rank} {describe_exit(code)}, without an error of its own"
        )
        self._failures.append(self._reports[rank])

    def _explain(self) -> WorkerFailed:
        """Return the error for the first failure that another worker's failure did not cause."""
        cause = next((failure for failure in self._failures if not failure.of_the_fleet), self._failures[0])
        assert cause.error is not None
        return WorkerFailed(cause.error, rank=cause.rank)

    # -- the end ---------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Pass Ctrl-C on and wait, so that workers can save; a second Ctrl-C stops waiting, and they are killed."""
        with suppress(KeyboardInterrupt):
            self._signal(signal.SIGINT)
            self._await(INTERRUPT_GRACE_S)

    def end(self) -> None:
        """End every worker that still runs, whatever happened."""
        try:
            if any(not _over(process.pid) for process in self._running()):
                self._signal(signal.SIGTERM)
                self._await(TERM_GRACE_S)
        finally:
            for process in self._running():
                self._kill(process)
                process.join()
            for reader in self._readers:
                reader.close()

    def _running(self) -> list[Any]:
        return [process for rank, process in enumerate(self._processes) if rank not in self._ended]

    def _await(self, seconds: float) -> None:
        until = concurrency.monotonic() + seconds
        while concurrency.monotonic() < until and any(not _over(process.pid) for process in self._running()):
            concurrency.sleep(TICK_S / 2)

    def _signal(self, number: int) -> None:
        for process in self._running():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    @staticmethod
    def _kill(process: Any) -> None:
        """Kill a worker and the process group it leads, which holds every process that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _over(pid: int) -> bool:
    """Return whether this child has ended, without reaping it: its process id stays in use until it is joined."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


@dataclass(frozen=True)
class FunctionReport:
    """A worker's report of how its function ended."""

    rank: int
    value: bytes = b""
    """The function's result, pickled."""
    error: str | None = None
    """The exception that the function raised, with its traceback."""
    of_the_fleet: bool = False
    """Whether the exception was a `FleetError`: another worker's failure, as seen by this one."""


@contextmanager
def _one_hash_seed() -> Iterator[None]:
    """Let new interpreters hash strings alike, so that a set of names has one order on every worker."""
    given = "PYTHONHASHSEED" in os.environ
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        yield
    finally:
        if not given:
            del os.environ["PYTHONHASHSEED"]


def work(
    order: Any, environment: dict[str, str], writer: Connection, parent: int, leave: Callable[[], None] | None = None
) -> None:
    """Run the function in this process, a worker's own; in a fork, ``leave`` closes what belongs to the parent."""
    end_with_parent(parent)
    os.setsid()
    if leave is not None:
        leave()
        atexit._clear()
        signal.set_wakeup_fd(-1)  # a notebook's loop would get this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for own in (*ELASTIC_VARIABLES, *GROUP_VARIABLES, "PACELINE_LAUNCHER"):
        os.environ.pop(own, None)
    os.environ.update(environment)
    if (name := loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    _limit_threads(copied=leave is not None)
    report = _run(order, int(environment["RANK"]))
    _send(writer, report)
    if leave is not None or report.error is not None:
        if report.error is None:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # A failed round may leave the engine's threads stuck: they are not waited for.
        os._exit(0 if report.error is None else FLEET_FAILED if report.of_the_fleet else 1)


def _run(order: Any, rank: int) -> FunctionReport:
    try:
        fn, args = pickle.loads(order) if isinstance(order, bytes) else order
        value = fn(*args)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code:
            return FunctionReport(rank, error=f"worker {rank} ended with sys.exit({end.code!r})")
        value = None
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return FunctionReport(
            rank, error=f"worker {rank} failed:\n\n{text}", of_the_fleet=isinstance(error, FleetError)
        )
    try:
        return FunctionReport(rank, value=pickle.dumps(value))
    except Exception as error:
        problem = f"worker {rank} returned a {type(value).__name__} that cannot be handed back ({error})"
        return FunctionReport(rank, error=f"{problem}: return plain values, tensors or a state_dict")


def _send(writer: Connection, report: FunctionReport) -> None:
    try:
        writer.send(report)
        writer.close()
    except OSError:  # nobody listens any more
        os._exit(1)


def _limit_threads(*, copied: bool) -> None:
    """Limit torch to one thread, as ``paceline run`` does; a copy needs this, for its thread pool was not copied."""
    if copied or "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)
