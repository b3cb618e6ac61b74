"""A fleet on a Ray cluster: each worker is an actor of its own, on a node of its own choice.

    from paceline.adapters import ray as paceline_ray
    result = paceline_ray.run("train.py", workers="2:8", num_gpus=1)

Ray finds nodes, and an autoscaler sees workers that wait for one as demand; Paceline's own roster, which runs in the
driver's process, decides the members of the fleet. So a lost node costs the others a fraction of a second, and its
worker returns on another node, as on one computer (docs/failures.md). Needs Ray: ``pip install 'paceline[ray]'``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.adapters.ray.demand import Demand, make_demand
from paceline.errors import WorkerFailed
from paceline.launcher.screen import remove_empty
from paceline.launcher.supervise import Order, supervise, worker_settings
from paceline.launcher.tokens import own_token
from paceline.observe import new_run_dir, read_log
from paceline.renamed import names_present_keywords

if TYPE_CHECKING:
    from paceline.launcher.faults import Faults
    from paceline.observe import RunLog

__all__ = ["RayResult", "run"]


@dataclass(frozen=True)
class RayResult:
    """Results of a run on Ray."""

    run_dir: Path
    """The run's folder on the driver's disk, for ``paceline report``."""
    values: Mapping[int, Any] = field(default_factory=dict)
    """Return values of the function, by number of the worker, for those that ended well; empty for a script."""

    @property
    def log(self) -> RunLog:
        """The run's log, as `paceline.observe.read_log` reads it."""
        return read_log(self.run_dir)


@names_present_keywords
def run(
    target: str | os.PathLike[str] | Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: str | int = "2:8",
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    label_selector: Mapping[str, str] | None = None,
    address: str = "auto",
    runtime_env: Mapping[str, Any] | None = None,
    name: str | None = None,
    output_dir: str | Path = "runs",
    pace: str | None = None,
    combine: str | None = None,
    comm_dtype: str | None = None,
    quiet: bool = False,
) -> RayResult:
    """Run a training script, or a function, on every worker of a fleet on a Ray cluster, to its end.

    The function calls ``paceline.join()`` as a script does. Ctrl-C ends all workers and is raised. Call it on a node of
    the cluster, in the main thread.

    Args:
        target: path of a script, as the nodes see it, or a function.
        args: arguments of the script or of the function.
        workers: the fewest workers with which the fleet trains and the most that it requests from Ray, as ``"2:8"``; or
            one number.
        num_cpus: CPUs per worker, as for any actor of Ray; so are ``num_gpus``, ``resources`` and ``label_selector``.
        num_gpus: GPUs per worker.
        resources: custom resources of Ray per worker.
        label_selector: labels that a worker's node must have.
        address: address of the cluster: "auto" or ``host:port``; not used when ``ray.init`` was called before.
        runtime_env: Ray's runtime environment of the workers: working folder, environment variables, packages.
        name: name of the run, for its log; by default that of the script or the function.
        output_dir: folder in which the run's own folder is made.
        pace: pace by name, as the option of ``paceline run``; overrides what the script sets.
        combine: combine by name; overrides what the script sets.
        comm_dtype: number format of sums on the network; overrides what the script sets.
        quiet: if True, print no view and no verdict.

    Returns:
        The run's folder, and what the function returned on each worker.

    Raises:
        ValueError: something cannot be started.
        WorkerFailed: the run ends with an error, which was printed.
    """
    from paceline.launcher.faults import Faults

    check_installed("paceline.adapters.ray.run")
    bounds = _bounds(workers)
    demand = make_demand(num_cpus, num_gpus, resources, label_selector)
    called, function, title = _target(target, args)
    run_dir = new_run_dir(Path(output_dir), name or title).resolve()
    settings = worker_settings(name=name or title, run_dir=run_dir, pace=pace, combine=combine, comm_dtype=comm_dtype)
    order = Order(called, bounds[1], settings, run_dir, quiet=quiet)
    token, values = own_token(None), dict[int, bytes]()
    code = launch(
        order,
        bounds,
        demand,
        token=token,
        faults=Faults(),
        address=address,
        runtime_env=runtime_env,
        function=function,
        values=values,
    )
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise WorkerFailed(f"the run on Ray ended with code {code}; its folder is {run_dir}", rank=0)
    if not values:
        return RayResult(run_dir)
    from ray import cloudpickle

    return RayResult(run_dir, {number: cloudpickle.loads(value) for number, value in sorted(values.items())})


def launch(
    order: Order,
    bounds: tuple[int, int],
    demand: Demand,
    *,
    token: str,
    faults: Faults,
    address: str = "auto",
    runtime_env: Mapping[str, Any] | None = None,
    function: bytes | None = None,
    values: dict[int, bytes] | None = None,
) -> int:
    """Run ``order``, whose command is what follows the interpreter, to its end; return the exit code.

    ``values`` receives what ``function`` returned. Raise ValueError when there is no cluster.
    """
    import ray

    from paceline.adapters.ray.cluster import Cluster, RayPolicy, connect, own_roster

    try:
        came = connect(address, runtime_env)
    except ValueError:
        remove_empty(order.run_dir)
        raise
    try:
        roster = own_roster(*bounds, token, ray.util.get_node_ip_address())
        cluster = Cluster(
            demand, order.run_dir, called=order.command, function=function, runtime_env=None if came else runtime_env
        )
        try:
            return supervise(order, RayPolicy(roster, faults, cluster), cluster.start)
        finally:
            cluster.close()
            if values is not None:
                values.update(cluster.returned)
    finally:
        if came:
            ray.shutdown()


def check_installed(who: str) -> None:
    """Raise ValueError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"{who} needs Ray, which is not installed: pip install 'paceline[ray]'")


def _bounds(workers: str | int) -> tuple[int, int]:
    low, colon, high = str(workers).partition(":")
    if isinstance(workers, bool) or not low.isdigit() or (colon and not high.isdigit()):
        raise ValueError(f'workers is the fewest and the most, such as "2:8", or one number, got {workers!r}')
    fewest, most = int(low), int(high or low)
    if not 1 <= fewest <= most:
        raise ValueError(f'workers={workers!r}: at least one, and the fewest first, such as "2:8"')
    return fewest, most


def _target(target: Any, args: Sequence[Any]) -> tuple[tuple[str, ...], bytes | None, str]:
    """Return the words after the interpreter, the pickled function, and a name."""
    if isinstance(target, (str, os.PathLike)):
        return (os.fspath(target), *map(str, args)), None, Path(target).stem
    if not callable(target):
        raise ValueError(f"run takes a script's path or a function, got {type(target).__name__}")
    from ray import cloudpickle

    return (), cloudpickle.dumps(partial(target, *args)), getattr(target, "__name__", "run")
