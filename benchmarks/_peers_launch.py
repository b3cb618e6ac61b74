"""How the workers of each peer are started, on one computer or on several with a link each, as its own docs say."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _peers_link import Place
from _smoke import free_port

SCRIPTS = Path(__file__).with_name("peers")
SOURCE = Path(__file__).parents[1] / "src"
MARK = "PEERS_RUN"
"""Variable that every process of a run has: by it they are found again, whoever started them."""


class Run:
    """The processes of one run. Use as a context manager: none of them stays."""

    def __init__(self, python: str, folder: Path, places: Sequence[Place], settings: Mapping[str, str]) -> None:
        self.python, self.folder, self.places = python, folder, places
        self.notes, self.on_link = folder / "notes", places[0].card != "lo"
        self.notes.mkdir(parents=True)
        self._id = uuid.uuid4().hex
        self.scratch = Path(tempfile.gettempdir()) / f"peers{self._id[:8]}"  # short, for paths of sockets
        self._log = (folder / "log").open("ab")
        self._settings = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "TORCHELASTIC"))},
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{SCRIPTS}",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PEERS_NOTES": str(self.notes),
            "PEERS_FOLDER": str(folder),
            MARK: self._id,
            **settings,
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        """When all of these have ended, the run has."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        looks_without = 0
        for _ in range(50):
            left = self._processes()
            looks_without = 0 if left else looks_without + 1
            if looks_without == 2:  # a process that is just being started has no environment for a moment
                break
            for pid in left:
                _kill(pid)
            time.sleep(0.1)
        for worker in self.workers:
            worker.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._log.close()

    def start(self, place: Place, *args: str, **settings: str) -> subprocess.Popen[bytes]:
        """A process of the peers' interpreter there."""
        return self.command(place, self.python, *args, **settings)

    def command(self, place: Place, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        here = {"GLOO_SOCKET_IFNAME": place.card, "PEERS_ADDRESS": place.address}
        return subprocess.Popen(
            [*place.prefix, *words],
            env={**self._settings, **here, **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self.folder,
            start_new_session=True,  # Ctrl-C is the benchmark's
        )

    def tool(self, name: str) -> str:
        """A program of the peers' environment."""
        return str(Path(self.python).with_name(name))

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _processes(self) -> list[int]:
        found, wanted = [], f"{MARK}={self._id}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def by_variables(script: str) -> Callable[[Run], None]:
    """One process a machine, which find one another by the variables of torch's ``env://``."""

    def launch(run: Run) -> None:
        port, world = str(free_port()), str(len(run.places))
        for rank, place in enumerate(run.places):
            meeting = {"MASTER_ADDR": run.places[0].address, "MASTER_PORT": port, "WORLD_SIZE": world}
            own = {"RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0", "PEERS_SLOT": str(rank)}
            run.workers.append(run.start(place, str(SCRIPTS / script), **meeting, **own))

    return launch


def paceline(run: Run) -> None:
    """Workers may come and go under the launcher; on links, where nobody fails, a fleet of fixed size as torchrun's."""
    if run.on_link:
        by_variables("on_paceline.py")(run)
        return
    options = [
        "run",
        "-q",
        "-n",
        f"1:{len(run.places)}",
        "--output-dir",
        str(run.folder),
        str(SCRIPTS / "on_paceline.py"),
    ]
    run.workers.append(run.start(run.places[0], "-m", "paceline.cli", *options))


def torchrun(run: Run) -> None:
    script, options = str(SCRIPTS / "on_torchrun.py"), ["-m", "torch.distributed.run", "--max-restarts=3"]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if not run.on_link:
        place = [*options, "--standalone", f"--nproc-per-node={len(run.places)}"]
        run.workers.append(run.start(run.places[0], *place, script, **own))
        return
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={run.places[0].address}:{free_port()}"]
    for slot, place in enumerate(run.places):
        shape = [f"--nnodes={len(run.places)}", "--nproc-per-node=1", f"--local-addr={place.address}"]
        run.workers.append(run.start(place, *options, *meeting, *shape, script, PEERS_SLOT=str(slot), **own))


def torchft(run: Run) -> None:
    port = free_port()
    times = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    run.command(run.places[0], run.tool("torchft_lighthouse"), *times, "--bind", f"[::]:{port}")
    for slot, place in enumerate(run.places):
        own = {
            "TORCHFT_LIGHTHOUSE": f"http://{run.places[0].address}:{port}",
            "REPLICA_GROUP_ID": str(slot),
            "NUM_REPLICA_GROUPS": str(len(run.places)),
            "PEERS_SLOT": str(slot),
        }
        options = ["--max-restarts=3", "--nnodes=1", "--nproc-per-node=1", f"--master-port={free_port()}"]
        script = str(SCRIPTS / "on_torchft.py")
        run.workers.append(run.start(place, "-m", "torch.distributed.run", *options, script, **own))


def hivemind(run: Run) -> None:
    script = str(SCRIPTS / "on_hivemind.py")
    run.workers.append(run.start(run.places[0], script, PEERS_SLOT="0"))
    first = _await_line(run, "first peer: ").split()[-1]
    for slot, place in enumerate(run.places[1:], start=1):
        run.workers.append(run.start(place, script, PEERS_SLOT=str(slot), PEERS_FIRST=first))


def ray(run: Run) -> None:
    script, own = str(SCRIPTS / "on_ray.py"), {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(run.scratch)}
    own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}  # a cluster of several nodes asks for one
    own["RAY_worker_niceness"] = "0"  # as everybody else
    if not run.on_link:
        run.workers.append(run.start(run.places[0], script, **own))
        return
    first = f"{run.places[0].address}:{free_port()}"
    for number, place in enumerate(run.places):
        role = [f"--address={first}"] if number else ["--head", f"--port={first.rpartition(':')[2]}"]
        options = ["start", "--block", "--num-cpus=2", f"--node-ip-address={place.address}", *role]
        run.command(place, run.tool("ray"), *options, **own)
        _await_line(run, "Ray runtime started.", count=number + 1)
    run.workers.append(run.start(run.places[0], script, PEERS_RAY=first, **own))


LAUNCH: dict[str, Callable[[Run], None]] = {
    "paceline": paceline,
    "ddp": by_variables("on_ddp.py"),
    "join": by_variables("on_join.py"),
    "torchrun": torchrun,
    "torchft": torchft,
    "hivemind": hivemind,
    "lightning": by_variables("on_lightning.py"),
    "ray": ray,
}


def _await_line(run: Run, text: str, *, count: int = 1) -> str:
    """The first line of the log with this text, once there are so many of them."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = [line for line in run.said().splitlines(keepends=True) if text in line and line.endswith("\n")]
        if len(found) >= count:
            return found[0]
        time.sleep(0.1)
    raise TimeoutError(f"no {text!r} within two minutes: {run.said()[-300:]}")
