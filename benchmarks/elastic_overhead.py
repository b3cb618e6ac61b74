"""What it costs that workers may come and go, as long as none does: elastic against fixed transport, step by step.

Four processes with one thread each are in two fleets at once: one of fixed members, and one under a roster. Both train
the same MLP of 25M parameters on equal shares, a step of one and a step of the other in turn. The figure is the median
over pairs of neighbouring steps, with a 95 % bootstrap interval. Then the same with a model of a few numbers, where
nothing is left of a step but what the fleet itself does: *membership_ms* is the median difference there. The beats
that each worker sends to the roster, five a second on a thread of their own, fall into the steps of both.

    python benchmarks/elastic_overhead.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _smoke import forked, free_port, smoke, smoking
from overhead import KEEP_MEMORY, measure, mlp, ratio
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.roster import RosterServer

WORKERS = 4
TOKEN = "of the benchmark"
BATCH = {"mlp": 16, "tiny": 4}  # samples a worker
PAIRS = {"mlp": 30, "tiny": 400}
globals().update(smoke(WORKERS=2, PAIRS={"mlp": 2, "tiny": 2}))
ROSTER = "OVERHEAD_ROSTER"
"""Variable with the roster's address, for the second of the two fleets."""


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp() if name == "mlp" else nn.Linear(1024, 1)


def dataset(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    classes = 10 if name == "mlp" else 1
    return TensorDataset(
        torch.randn(2048, 1024, generator=generator), torch.randint(classes, (2048,), generator=generator)
    )


def steps(fleet: paceline.Fleet, name: str) -> Iterator[None]:
    """A training loop; each ``next`` is one step."""
    model = fleet.model(network(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fleet.track(optimizer=optimizer)
    batch = BATCH[name]
    for step in fleet.steps(dataset(name), global_batch=batch * WORKERS, micro_batch=batch, epochs=1000):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        step.commit(optimizer)
        yield


def work(name: str, folder: Path) -> list[list[float]]:
    """One worker's part: the pairs' seconds, [elastic, fixed]."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with paceline.join("equal", quiet=True, run_dir=folder / "fixed") as fixed:
        os.environ |= {"PACELINE_ROSTER": os.environ[ROSTER], "PACELINE_TOKEN": TOKEN}
        with paceline.join("equal", quiet=True, run_dir=folder / "elastic") as elastic:
            ours, plain = steps(elastic, name), steps(fixed, name)
            seconds = measure(ours, plain, PAIRS[name], dist.barrier)
            ours.close()
            plain.close()
    dist.destroy_process_group()
    return seconds


def start(name: str) -> np.ndarray:
    """Run a model in processes of its own, under a roster here; worker 0's pairs."""
    server = RosterServer(minimum=WORKERS, maximum=WORKERS, token=TOKEN, expect=WORKERS)
    with tempfile.TemporaryDirectory() as folder, closing(server):
        if smoking():
            shared = {ROSTER: server.address, "GLOO_SOCKET_IFNAME": "lo"}
            return np.array(forked(lambda: work(name, Path(folder)), WORKERS, begin=server.start, **shared)[0])
        server.start()
        base = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **KEEP_MEMORY}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), ROSTER: server.address}
        command = [sys.executable, __file__, name, folder]
        places = [{"RANK": rank, "WORLD_SIZE": WORKERS, "PACELINE_WORKER": rank} for rank in range(WORKERS)]
        settings = [base | {key: str(value) for key, value in place.items()} for place in places]
        processes = [subprocess.Popen(command, env=setting, stdout=subprocess.PIPE) for setting in settings]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a worker failed")
    return np.array(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    print(f"{sum(p.numel() for p in network('mlp').parameters()) / 1e6:.1f}M parameters, {WORKERS} processes ...")
    large = start("mlp")
    middle, low, high = ratio(large)
    elastic, fixed = np.median(large, axis=0) * 1e3
    print(f"  {middle:.3f} [{low:.3f}, {high:.3f}] over {len(large)} pairs: {elastic:.1f} ms against {fixed:.1f} ms")
    tiny = start("tiny")
    elastic, fixed = np.median(tiny, axis=0) * 1e3
    membership = float(np.median(tiny[:, 0] - tiny[:, 1])) * 1e3
    print(f"a model of nothing: {elastic:.2f} ms against {fixed:.2f} ms a step, {membership:.2f} ms more")
    figures = {"elastic_over_fixed": round(middle, 4), "elastic_over_fixed_interval": [round(low, 4), round(high, 4)]}
    print(json.dumps({**figures, "membership_ms": round(membership, 3)}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(work(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
