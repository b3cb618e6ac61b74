"""The training of digits.py in plain torch DDP, for comparison: equal shares, so the slowest machine sets the pace.

    torchrun --nproc-per-node 2 examples/plain_ddp.py
    paceline run --emulate 1,1,2,4 examples/plain_ddp.py             # four unlike machines, emulated

Network, data, batches, optimizer and schedule are those of digits.py. The lines marked "emulation" make a worker take
as long as the machine it plays; on real machines they do nothing. DDP overlaps its sums with the padded time, so what
is emulated is DDP at its best: communication costs it nothing.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits import datasets, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline import machines

PRINT_EVERY_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("plain_ddp.py needs a launcher: torchrun --nproc-per-node 2 examples/plain_ddp.py")

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.global_batch % size:
        sys.exit(f"--global-batch {options.global_batch} cannot be split equally over {size} workers")
    machine = machines.from_env(rank)  # emulation: the machine this worker plays, or None

    train, test = datasets()
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, batch_size=options.global_batch // size, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=options.epochs * len(loader))
    diary = Diary(quiet=rank > 0, steps=options.epochs * len(loader))
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        diary.begin()
        for x, y in loader:
            started = time.perf_counter()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if machine:
                machine.pad(len(diary.seconds), len(y), started)  # emulation: take as long as it would
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            diary.step(epoch, size * len(y), loss)
        if rank == 0:
            diary.accuracy = test_accuracy(model.module, test)
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {diary.accuracy:.1%}", flush=True)
    if rank == 0 and "PACELINE_RUN_DIR" in os.environ:
        diary.write(Path(os.environ["PACELINE_RUN_DIR"]) / "ddp.json")
    dist.destroy_process_group()
    time.sleep(0.2)  # a process that ends while the group's threads still close down is sometimes aborted


def test_accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


class Diary:
    """How long every step took (by the wall clock, all included), printed now and then and kept for tools."""

    def __init__(self, *, quiet: bool, steps: int) -> None:
        self.quiet, self.steps = quiet, steps
        self.epochs: list[int] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.accuracy = 0.0
        self._stepped = self._printed = time.perf_counter()

    def begin(self) -> None:
        """What comes between epochs (the test) belongs to no step."""
        self._stepped = time.perf_counter()

    def step(self, epoch: int, samples: int, loss: torch.Tensor) -> None:
        now = time.perf_counter()
        self.epochs.append(epoch)
        self.seconds.append(now - self._stepped)
        self.samples.append(samples)
        self._stepped = now
        if not self.quiet and len(self.seconds) > 1 and now - self._printed >= PRINT_EVERY_S:
            self._printed = now
            recent = slice(max(1, len(self.seconds) - 8), None)  # the first step waits for nobody yet
            speed = sum(self.samples[recent]) / sum(self.seconds[recent])
            done = f"step {len(self.seconds)}/{self.steps}  epoch {epoch + 1}"
            print(f"{done}  {speed:,.0f} samples/s  loss {loss:.3f}", flush=True)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"epochs": self.epochs, "seconds": self.seconds, "samples": self.samples, "accuracy": self.accuracy}
        path.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
