"""Handwritten digits (scikit-learn's) on whatever machines there are.

    python examples/digits.py                                        # one process
    torchrun --nproc-per-node 2 examples/digits.py                   # as before
    paceline run -n 4 --emulate 1,1,2,4 examples/digits.py           # four unlike machines, emulated

The same training in plain torch DDP is plain_ddp.py beside it.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test with, the same split everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def one_cycle(progress: float) -> float:
    """The learning rate's part of its peak: up for three tenths of the training, then down to nothing, as cosines."""
    if progress < 0.3:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * progress / 0.3)) / 2
    return (1 + math.cos(math.pi * (progress - 0.3) / 0.7)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    train, test = datasets()
    torch.manual_seed(options.seed)
    with paceline.join(seed=options.seed) as fleet:
        model = fleet.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps = fleet.steps(
            train, global_batch=options.global_batch, micro_batch=options.micro_batch, epochs=options.epochs
        )
        # By progress and not by counting steps: it is the same on every worker, however the work is combined.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: one_cycle(steps.progress))
        fleet.track(optimizer=optimizer, scheduler=scheduler)
        for step in steps:
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer, clip_norm=5.0)
            scheduler.step()
            if step.ends_epoch:
                accuracy = fleet.evaluate(lambda x, y: {"correct": model(x).argmax(1) == y}, test)["correct"]
                if fleet.is_leader:
                    print(f"epoch {step.epoch + 1}: loss {step.loss:.3f}, test accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
