"""The options of ``paceline run`` for workers on a Ray cluster; without ``--ray`` nothing of Ray is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Size, check_script

if TYPE_CHECKING:
    from paceline.adapters.ray.demand import Demand
    from paceline.launcher.faults import Faults
    from paceline.launcher.supervise import Order

PANEL = "On a Ray cluster"

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|ADDRESS",
        help="Start the workers on this cluster.",
        rich_help_panel=PANEL,
    ),
]
PerWorker = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Needs of each: gpus=1,cpus=4.", rich_help_panel=PANEL),
]
Labels = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Labels of nodes: spot=true,zone!=b.", rich_help_panel=PANEL),
]
RuntimeEnv = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|FILE",
        help="Ray's runtime_env, or a file of it.",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True)
class OnRay:
    """The Ray cluster on which the workers run, and what they need there."""

    address: str
    bounds: tuple[int, int]
    demand: Demand
    runtime_env: Mapping[str, Any] | None

    def launch(self, order: Order, *, token: str, faults: Faults) -> int:
        from paceline.adapters.ray import launch

        return launch(
            order,
            self.bounds,
            self.demand,
            token=token,
            faults=faults,
            address=self.address,
            runtime_env=self.runtime_env,
        )


def read_ray(
    ray: str | None,
    size: Size,
    *,
    per_worker: str | None,
    labels: str | None,
    runtime_env: str | None,
    **others: object,
) -> OnRay | None:
    """Return what ``--ray`` asks for, None without it; ``others`` are options, by name, without a meaning on Ray."""
    if ray is None:
        belong = {"--per-worker": per_worker, "--labels": labels, "--runtime-env": runtime_env}
        if given := [option for option, value in belong.items() if value is not None]:
            raise ValueError(f"{given[0]} is for workers on a Ray cluster: give --ray auto, or its address")
        return None
    from paceline.adapters.ray import check_installed
    from paceline.adapters.ray.demand import read_demand

    if unfit := [name for name, value in others.items() if value]:
        option = f"--{unfit[0].replace('_', '-')}"
        raise ValueError(f"{option} has no meaning with --ray, where Ray finds the nodes: leave it out")
    if size.bounds is None:
        raise ValueError("--ray needs the number of workers: give -n MIN:MAX, such as -n 2:8")
    check_installed("--ray")
    return OnRay(ray, size.bounds, read_demand(per_worker, labels), _read_runtime_env(runtime_env))


def ray_count(ray: str | None, n: str | None) -> str | None:
    """Turn ``-n 4`` into ``-n 4:4`` on Ray, where workers return, too.

    >>> ray_count("auto", "4"), ray_count(None, "4")
    ('4:4', '4')
    """
    return f"{n}:{n}" if ray is not None and n is not None and n.isdigit() else n


def check_ray_script(on_ray: OnRay, script: str, module: bool) -> None:
    """Run `check_script` in the folder that Ray copies to the nodes; one that Ray itself fetches is not checked."""
    brought = (on_ray.runtime_env or {}).get("working_dir")
    if brought is None:
        check_script(script, module)
    elif not module and Path(str(brought)).is_dir():
        check_script(script, module, Path(str(brought)))


def _read_runtime_env(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        if text.lstrip().startswith("{"):
            read = json.loads(text)
        else:
            import yaml  # comes with Ray; JSON is YAML too

            read = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--runtime-env: {text} cannot be read ({error})") from None
    except Exception as error:  # yaml's own errors
        raise ValueError(f"--runtime-env: {text} is not YAML ({next(iter(str(error).splitlines()), '')})") from None
    if not isinstance(read, dict):
        raise ValueError(f'--runtime-env: {text} is not a mapping; write such as {{"working_dir": "."}}')
    return read
