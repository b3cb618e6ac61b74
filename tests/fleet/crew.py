"""Starts real workers for tests: each runs one function of a case file and hands back what it returned."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nursery import Nursery, Worker, end_all

from ports import own_port


@dataclass
class Outcome:
    """How one worker ended."""

    code: int
    value: Any
    out: str
    err: str


@cache
def nursery() -> Nursery:
    return Nursery(Path(__file__).parents[1], Path(__file__).parent)


def start(folder: Path, number: int, case: str, args: Any, env: dict[str, str]) -> Worker:
    """A worker that runs a case; what it writes and its value go to files of its number in ``folder``."""
    out, err, value = (folder / f"{name}.{number}" for name in ("out", "err", "value"))
    value.unlink(missing_ok=True)
    return nursery().start("crew:work", case, str(value), json.dumps(args), env=env, out=out, err=err)


def run_program(file: Path, folder: Path, *args: str, within: float) -> Outcome:
    """A program that starts at once, since torch is loaded; its value is its last line, which is JSON."""
    out, err = folder / "out", folder / "err"
    worker = nursery().start("crew:program", str(file), str(folder), *args, env={}, out=out, err=err, quick=True)
    try:
        code = worker.wait(within)
    finally:
        end_all([worker])
    last = (_text(out).splitlines() or [""])[-1]
    return Outcome(code, json.loads(last) if code == 0 else None, _text(out), _text(err))


def outcome(folder: Path, number: int, code: int | None) -> Outcome:
    """How this worker has ended, as far as it has."""
    value = folder / f"value.{number}"
    parsed = json.loads(value.read_text()) if value.exists() else None
    texts = [_text(folder / f"{name}.{number}") for name in ("out", "err")]
    return Outcome(999 if code is None else code, parsed, *texts)


class Crew:
    """Workers under way. Use as a context manager: nothing survives it."""

    def __init__(self, case: str, size: int, folder: Path, *, args: Any = None, env: dict[str, str] | None = None):
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)
        port = own_port()
        self.workers = [self._start(case, rank, port, args, env or {}) for rank in range(size)]

    def _start(self, case: str, rank: int, port: int, args: Any, env: dict[str, str]) -> Worker:
        variables = {"PACELINE_RUN_DIR": str(self.folder / "run")}
        if self.size > 1:
            place = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank}
            variables |= {key: str(value) for key, value in place.items()}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return start(self.folder, rank, case, args, variables | env)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self.workers)

    def wait_for(self, name: str, *, within: float = 60.0) -> None:
        """Until a worker has made the file ``name`` in the crew's folder."""
        until = time.monotonic() + within
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"no worker made {name}: {[o.err[-2000:] for o in self._read()]}"
            time.sleep(0.02)

    def wait(self, *, within: float = 120.0) -> list[Outcome]:
        until = time.monotonic() + within
        for worker in self.workers:
            try:
                worker.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a worker hangs: {[o.err[-3000:] for o in self._read()]}") from None
        return self._read()

    def _read(self) -> list[Outcome]:
        return [outcome(self.folder, rank, worker.poll()) for rank, worker in enumerate(self.workers)]


def run(case: str, size: int, folder: Path, *, args: Any = None, env: dict[str, str] | None = None) -> list[Any]:
    """Run a case to its end on ``size`` workers and return their values; any failure fails the test with its text."""
    with Crew(case, size, folder, args=args, env={"QUICK_EXIT": "1", **(env or {})}) as crew:
        outcomes = crew.wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"worker {rank} ended with {outcome.code}:\n{outcome.err[-4000:]}"
    return [outcome.value for outcome in outcomes]


def _text(path: Path) -> str:
    """What the worker wrote, without what torch 2.15's Triton (CUDA builds) writes behind it as the process ends."""
    return path.read_text(errors="replace").partition("nanobind: leaked ")[0] if path.exists() else ""


def program(file: str, folder: str, *args: str) -> None:
    """The worker's side of `run_program`."""
    os.chdir(folder)
    sys.argv = [file, *args]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


def work(case: str, value: str, args: str) -> None:
    """The worker's side: ``file.py:function`` beside this file, where to put the value, and the arguments. Or a whole
    script, ``/folder/train.py``, whose value is what it leaves in its variable ``result``. With WIRE_ALL, tensors cross
    the wire asked for however small they are."""
    if os.environ.get("WIRE_ALL"):
        from paceline.transport import formats

        formats.SMALLEST = 0
    if ":" not in case:
        sys.argv = [case, *map(str, json.loads(args) or [])]
        Path(value).write_text(json.dumps(runpy.run_path(case, run_name="__main__").get("result")))
        return
    file, function = case.split(":")
    spec = importlib.util.spec_from_file_location("case", Path(__file__).with_name(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["case"] = module  # loader processes and pickles look it up
    spec.loader.exec_module(module)
    result = getattr(module, function)(json.loads(args))
    Path(value).write_text(json.dumps(result))
