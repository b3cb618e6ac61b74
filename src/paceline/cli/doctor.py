"""``paceline doctor``: whether everything that a fleet needs is here, and what this computer can do.

``paceline doctor --to HOST``: whether another computer is reached, how fast, and over which interface. Bytes are timed
with the doctor there, ``paceline doctor --answer`` (`paceline.transport.link_speed`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from paceline import concurrency
from paceline.cli.terminal import refuse
from paceline.roster.door import address_outwards
from paceline.transport.link_speed import MOST_BYTES, PORT, Answering, DoctorProbe, bandwidth

OLDEST_TORCH, NEWEST_TESTED = (2, 9), (2, 15)
MARKS = {"ok": "ok   ", "note": "note ", "failed": "FAIL "}
ALL_REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor, times = torch.ones(1 << 18), []
for _ in range(11):
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    times.append(time.perf_counter() - started)
print(sorted(times[1:])[5] * 1000)
dist.destroy_process_group()
"""
BATCH = 64
"""Batch size of the small ConvNet with which devices are measured."""
PATIENCE_S = 3.0
PINGS = 11
MEASURED_S = 1.0
"""Seconds for which each direction is measured."""


class Check(NamedTuple):
    """One line: its subject, ``ok``, ``note`` or ``failed``, the text, what to do, and the number in the text."""

    name: str
    state: str
    text: str
    advice: str = ""
    value: float | None = None


def doctor(
    output_dir: Annotated[Path, typer.Option(help="Folder in which runs will be recorded.")] = Path("runs"),
    probe_seconds: Annotated[float, typer.Option(min=0.0, help="Time for measuring the devices; 0: do not.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Only the way to another computer, and its speed."),
    ] = None,
    answer: Annotated[bool, typer.Option("--answer", help="Answer another computer's --to until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where --answer listens; 0: any free one.")] = PORT,
) -> None:
    """Check what a fleet needs on this computer, and measure what each device can do."""
    if answer:
        answer_others(port, also=to)
    checks: list[Check] = []
    for check in examine(output_dir, probe_seconds) if to is None else examine_way(to):
        checks.append(check)
        if not as_json:
            _print(check)
    failed = [check for check in checks if check.state == "failed"]
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        well = "Everything a fleet needs is here." if to is None else f"{to} is reached."
        verdict = f"{len(failed)} of {len(checks)} checks failed." if failed else well
        typer.echo(f"\n{verdict}")
    raise typer.Exit(1 if failed else 0)


def examine(runs: Path, probe_seconds: float) -> Iterator[Check]:
    """Yield all checks, one after the other; without torch, those that need it are left out."""
    yield check_python(sys.version_info[:2])
    torch = check_torch()
    yield torch
    yield _guarded("cpus", check_cpus)
    yield _guarded("clock", check_clock)
    yield _guarded("port", check_port)
    yield _guarded("network", check_network)
    yield _guarded("roster", check_roster)
    yield _guarded("run folder", lambda: check_runs(runs))
    if torch.state == "failed":
        return
    yield _guarded("gpus", check_gpus)
    yield _guarded("backends", check_backends)
    yield _guarded("all-reduce", check_all_reduce)
    yield _guarded("topology", lambda: check_topology(runs))
    if probe_seconds > 0:
        for name in (names := devices()):
            yield _guarded(name, partial(check_device, name, probe_seconds / len(names)))


def examine_way(to: str) -> Iterator[Check]:
    """Yield the checks of the way to another computer; refuse with one line what is not an address."""
    try:
        target = parse_target(to)
    except ValueError as error:
        refuse(f"doctor: --to: {error}")
    yield from examine_target(target)


def answer_others(port: int, *, also: str | None) -> NoReturn:
    """Answer other computers' ``--to`` until Ctrl-C."""
    if also is not None:
        refuse("doctor: give --to or --answer: one asks, and the other computer's answers")
    try:
        answering = Answering(port)
    except OSError as error:
        refuse(f"doctor: cannot listen on port {port} ({error.strerror or error}): give another with --port")
    with closing(answering):
        own = address_outwards() or socket.gethostname()
        typer.echo(
            f"answering doctors; on the other computer: paceline doctor --to {own}:{answering.port}   (Ctrl-C ends it)"
        )
        with suppress(KeyboardInterrupt):
            concurrency.Event().wait()
    raise typer.Exit(0)


def check_python(version: tuple[int, ...]) -> Check:
    text = f"Python {platform.python_version()} at {sys.executable}"
    return Check("python", "ok" if version >= (3, 11) else "failed", text, "" if version >= (3, 11) else "needs 3.11")


def check_torch() -> Check:
    try:
        import torch
    except Exception as error:  # a broken install raises anything
        return Check("torch", "failed", f"torch cannot be imported: {error}", "install it: pip install torch")
    return judge_torch(str(torch.__version__))


def judge_torch(version: str) -> Check:
    """Check that this version of torch is within the supported range."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    text = f"torch {version}"
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Check("torch", "failed", text, f"older than {oldest}: pip install --upgrade 'torch>={oldest}'")
    if found > NEWEST_TESTED:
        return Check("torch", "note", text, f"newer than the newest tested, {'.'.join(map(str, NEWEST_TESTED))}")
    return Check("torch", "ok", text)


def check_cpus() -> Check:
    usable = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    given = f"OMP_NUM_THREADS={threads}" if threads else "1 each under `paceline run` unless OMP_NUM_THREADS says more"
    return Check("cpus", "ok", f"{usable} usable, threads per worker: {given}", value=float(usable))


def check_clock() -> Check:
    resolution = time.get_clock_info("perf_counter").resolution
    over = sleep_overshoot()
    state = "ok" if over < 0.005 else "note"
    advice = "" if state == "ok" else "this computer is busy or its timer is coarse: emulated machines will be rough"
    text = f"resolution {resolution * 1e9:.0f} ns, a sleep of 1 ms lasts {over * 1e6:.0f} us too long"
    return Check("clock", state, text, advice, value=over)


def sleep_overshoot(times: int = 50, seconds: float = 0.001) -> float:
    """Return the median seconds by which a sleep lasts too long."""
    overs = []
    for _ in range(times):
        started = concurrency.perf_counter()
        concurrency.sleep(seconds)
        overs.append(concurrency.perf_counter() - started - seconds)
    return statistics.median(overs)


def check_port() -> Check:
    from paceline.launcher.fixed_fleet import RendezvousStore

    with closing(RendezvousStore()) as store:
        return Check("port", "ok", f"a free port can be bound (127.0.0.1:{store.port})")


def check_network() -> Check:
    from paceline.launcher.supervise import loopback

    outwards = interface_outwards(os.environ.get("MASTER_ADDR"))
    forced = os.environ.get("GLOO_SOCKET_IFNAME")
    chosen = f" (GLOO_SOCKET_IFNAME={forced} decides)" if forced else ""
    text = f"workers here meet over {loopback() or 'the address 127.0.0.1'}; "
    if outwards is None:
        return Check("network", "note", f"{text}other computers cannot be reached from here{chosen}")
    return Check("network", "ok", f"{text}other computers are reached over {outwards}{chosen}")


def check_roster() -> Check:
    """Check what `-n MIN:MAX` and `paceline host` need: a roster that a worker with the token can enter."""
    from paceline.roster import FINISHED, RosterClient, RosterServer

    server = RosterServer(minimum=1, maximum=1, token="doctor")
    server.start()
    try:
        started = concurrency.perf_counter()
        client = RosterClient(server.address, token="doctor", name="doctor/0", facts={}, on_over=lambda _: None)
        client.next_generation(after=0, fresh=True, orderly=True)
        seconds = concurrency.perf_counter() - started
        client.leave(FINISHED)
    finally:
        server.close()
    text = f"workers can come and go: one entered a fleet after {seconds * 1000:.1f} ms"
    return Check("roster", "ok", text, value=seconds)


def check_runs(runs: Path) -> Check:
    from paceline.observe import new_run_dir

    existed = runs.exists()
    try:
        folder = new_run_dir(runs, "doctor")
    except ValueError as error:
        return Check("run folder", "failed", str(error), "choose another with --output-dir")
    folder.rmdir()
    if not existed:
        runs.rmdir()
    return Check("run folder", "ok", f"{runs.resolve()} can be written")


def check_gpus() -> Check:
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not found:
        return Check("gpus", "note", "none that torch can use: workers will run on the CPU", value=0.0)
    names = [f"cuda:{i} {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(found)]
    return Check("gpus", "ok", ", ".join(names), value=float(len(found)))


def check_backends() -> Check:
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        return Check("backends", "failed", "this torch has no Gloo", "install a build of torch with distributed")
    nccl = "Gloo and NCCL" if dist.is_nccl_available() else "Gloo (NCCL is not in this build; only GPUs need it)"
    return Check("backends", "ok", nccl)


def check_all_reduce() -> Check:
    milliseconds, problem = all_reduce_ms()
    if milliseconds is None:
        advice = "a firewall or a wrong GLOO_SOCKET_IFNAME: unset it, or set it to the loopback interface"
        return Check("all-reduce", "failed", f"two processes could not add 1 MB over loopback: {problem}", advice)
    return Check("all-reduce", "ok", f"two processes add 1 MB in {milliseconds:.1f} ms over loopback", "", milliseconds)


def check_topology(runs: Path) -> Check:
    """Check by which name this computer is identified and, from the latest run's log, where its workers were."""
    from paceline.observe import latest, read_log
    from paceline.observe.words.lines import last_places, places_text
    from paceline.transport.survey import place_facts

    facts = place_facts()
    off = ", PACELINE_SITES=off: sums go round workers in the order of ranks" if "sites" in facts else ""
    text = f"workers with the name {facts['computer']} are on this computer{off}"
    folder = latest(runs)
    try:
        log = read_log(folder) if folder is not None else None
    except ValueError:  # the folder holds no log that can be read
        log = None
    if folder is None or log is None:
        return Check("topology", "ok", text)
    where = places_text(last_places(log.run, log.others)) or "all workers on one computer"
    return Check("topology", "ok", f"{text}; in the latest run, {folder.name}: {where}")


def check_device(name: str, seconds: float) -> Check:
    """Measure the samples/s of a small ConvNet on one device."""
    speed = probe(name, seconds)
    threads = ", one thread" if name == "cpu" else ""
    text = f"{speed:,.0f} samples/s (small ConvNet, 32 x 32 images, forward and backward{threads})"
    return Check(name, "ok", text, value=speed)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; an exception in it counts as a failed check, so that the others still run."""
    try:
        return check()
    except Exception as error:
        return Check(name, "failed", f"{type(error).__name__}: {error}", "the check itself failed; see the text")


def _print(check: Check) -> None:
    typer.echo(f"{MARKS[check.state]} {check.name:<11} {check.text}")
    if check.advice:
        typer.echo(f"{'':17} -> {check.advice}")


# -- measurements ------------------------------------------------------------------------------------------------


def all_reduce_ms(timeout_s: float = 30.0) -> tuple[float | None, str]:
    """Return the median milliseconds of adding 1 MB between two new processes, or None and the reason."""
    from paceline.errors import describe_exit
    from paceline.launcher.fixed_fleet import RendezvousStore
    from paceline.launcher.supervise import loopback
    from paceline.launcher.worker_process import WorkerProcess

    here = {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}
    with closing(RendezvousStore()) as store:
        store.start()
        given = [{**here, **os.environ, "OMP_NUM_THREADS": "1", **store.environment(rank, 2)} for rank in range(2)]
        workers = [WorkerProcess(rank, [sys.executable, "-c", ALL_REDUCE], given[rank]) for rank in range(2)]
        try:
            outputs = [worker.process.communicate(timeout=timeout_s) for worker in workers]
        except TimeoutExpired:
            return None, f"no answer within {timeout_s:.0f} s"
        finally:
            for worker in workers:
                worker.send(9)
                worker.process.wait()
    for worker, (_, error) in zip(workers, outputs):
        if code := worker.process.returncode:
            lines = error.decode(errors="replace").strip().splitlines() or [describe_exit(code)]
            return None, lines[-1]
    *_, last = outputs[0][0].splitlines()  # the Gloo of torch 2.9 and 2.10 prints a line of its own before it
    return float(last), ""


def devices() -> list[str]:
    """Return every device of this computer that a worker can be given."""
    import torch

    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *names, *(["mps"] if torch.backends.mps.is_available() else [])]


def probe(device: str, seconds: float) -> float:
    """Return the samples/s of a small ConvNet, forward and backward, over ``seconds``, a third of them warm-up."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of `paceline run` has it
    try:
        net, x, y = _small_net(device)
        _train(net, x, y, device, seconds / 3)
        return _train(net, x, y, device, seconds * 2 / 3)
    finally:
        torch.set_num_threads(threads)


def _small_net(device: str) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return net.to(device), torch.randn(BATCH, 3, 32, 32).to(device), torch.randint(10, (BATCH,)).to(device)


def _train(net: Any, x: Any, y: Any, device: str, seconds: float) -> float:
    """Return the samples/s over ``seconds``; the device is synchronised after every batch."""
    import torch

    batches, started = 0, concurrency.perf_counter()
    while batches == 0 or concurrency.perf_counter() - started < seconds:
        net.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        if device != "cpu":
            torch.accelerator.synchronize(device)
        batches += 1
    return batches * BATCH / (concurrency.perf_counter() - started)


def interface_outwards(host: str | None = None) -> str | None:
    """Return the interface of packets to ``host``, or to any computer, as ``eth0 (10.0.0.7)``; None without a route."""
    if (address := address_outwards(host)) is None:
        return None
    from paceline.transport.network import interfaces

    name = next((name for name, own in interfaces().items() if own == address), None)
    return f"{name} ({address})" if name else address


class Target(NamedTuple):
    """Another computer, as the user named it and as the system finds it."""

    name: str
    address: str
    port: int
    told: bool
    """Whether the user gave the port."""


def parse_target(text: str) -> Target:
    """Look ``HOST[:PORT]`` up; ValueError, in one line, where that cannot be.

    >>> parse_target("127.0.0.1:80"), parse_target("127.0.0.1").port
    (Target(name='127.0.0.1', address='127.0.0.1', port=80, told=True), 7071)
    """
    bare = text.strip()
    host, _, port = bare.rpartition(":") if bare.count(":") == 1 or "]:" in bare else (bare, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or (":" in bare and not port and bare.endswith(":")):
        raise ValueError(f"{text!r} is no computer's address; write HOST or HOST:PORT, for example 10.0.0.5:{PORT}")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"the port in {text!r} is not a number from 1 to 65535")
    number = int(port or PORT)
    try:
        address = str(socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"no computer is known as {host!r} here ({reason}): give its address") from None
    return Target(host, address, number, bool(port))


def examine_target(target: Target) -> Iterator[Check]:
    """Yield what is found about the way to another computer, line by line."""
    yield way_out(target)
    began = concurrency.perf_counter()
    try:
        connection = socket.create_connection((target.address, target.port), timeout=PATIENCE_S)
    except ConnectionRefusedError:
        yield _refused(target, concurrency.perf_counter() - began)
        return
    except OSError as error:
        yield _unreached(target, error)
        return
    connected_s = concurrency.perf_counter() - began
    with connection:
        probe = DoctorProbe(connection)
        if not probe.greeted():
            text = f"{_where(target)} takes connections ({connected_s * 1000:.1f} ms to connect); it is not a doctor"
            yield Check("reach", "ok", text, _ask_for_doctor(target), connected_s)
            return
        yield Check("reach", "ok", f"the doctor at {_where(target)} answers")
        try:
            yield from measured(probe)
        except OSError as error:
            yield Check("bandwidth", "failed", f"the connection broke while bytes were timed ({error})")


def way_out(target: Target) -> Check:
    """Find the interface that packets leave by, and the one that Gloo would use."""
    from paceline.transport.network import address_towards, interfaces

    known = interfaces()
    forced = os.environ.get("GLOO_SOCKET_IFNAME")
    if forced and forced not in known:
        others = ", ".join(f"{name} ({address})" for name, address in known.items())
        return Check(
            "way", "failed", f"GLOO_SOCKET_IFNAME is {forced}, which has no address here", f"there are {others}"
        )
    try:
        address = address_towards(target.address, target.port)
    except OSError as error:
        return Check("way", "failed", f"no route to {target.address} ({error.strerror or error})")
    name = next((name for name, own in known.items() if own == address), "an unnamed interface")
    if forced and known[forced] != address:
        text = f"packets leave by {name} ({address}); Gloo uses {forced} ({known[forced]}), as GLOO_SOCKET_IFNAME says"
        return Check("way", "note", text, "unset it, unless the others reach this computer there")
    return Check("way", "ok", f"packets leave by {name} ({address}), and Gloo would use it")


def measured(probe: DoctorProbe) -> Iterator[Check]:
    """Yield the round trip and both directions' bandwidth, measured with the doctor there."""
    trips = sorted(probe.trip_s() for _ in range(PINGS))
    latency = statistics.median(trips)
    text = f"{latency * 1000:.1f} ms there and back (median of {PINGS}, longest {trips[-1] * 1000:.1f})"
    yield Check("latency", "ok", text, value=latency)
    there, back = (
        bandwidth(timed, trip_s=latency, most_bytes=MOST_BYTES, lasting_s=MEASURED_S)
        for timed in (probe.there_s, probe.back_s)
    )
    text = f"{there / 1e6:,.0f} Mbit/s there, {back / 1e6:,.0f} Mbit/s back"
    yield Check("bandwidth", "ok", text, value=min(there, back))


def _refused(target: Target, seconds: float) -> Check:
    text = f"{target.address} answers after {seconds * 1000:.1f} ms, but nothing listens at port {target.port}"
    return Check("reach", "failed" if target.told else "note", text, _ask_for_doctor(target), seconds)


def _unreached(target: Target, error: OSError) -> Check:
    silent = isinstance(error, TimeoutError)
    how = f"no answer within {PATIENCE_S:.0f} s" if silent else str(error.strerror or error)
    advice = (
        "a firewall drops what comes there, or no network leads to it" if silent else "is it switched on, and near?"
    )
    return Check("reach", "failed", f"{_where(target)} is not reached: {how}", advice)


def _where(target: Target) -> str:
    named = f" ({target.address})" if target.name != target.address else ""
    return f"{target.name}{named}, port {target.port}"


def _ask_for_doctor(target: Target) -> str:
    return (
        f"bandwidth is measured with the doctor there: run `paceline doctor --answer` on {target.name}, and this again"
    )
