"""P4's grid in one process a part: many small CNNs side by side (`_replicas`), on Fashion-MNIST and MNIST."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import torch
from _data import load
from _replicas import Batch, Case, Images, Result
from _smoke import smoke
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.research.elastic_average import ElasticAverage

FAILURES = {"none": "", "A": "lost:0.333", "B": "frozen:0.1x5", "C": "restart:0.02x20"}
STALE = {"C stale": "restart:0.02x20:stale"}
"""Who returns has the weights with which it went; only at k 4, tau 1, no overlap."""
OPTIMISERS = ("sgd", "nesterov", "adahessian")
WORKERS, TAUS, OVERLAPS = (4, 8), (1, 2, 4), (0.0, 0.125, 0.25, 0.375, 0.5)
RULES = {
    "fixed": ElasticAverage(weights="fixed"),
    "dynamic": ElasticAverage(weights="dynamic"),
}
MORE_RULES = {
    "from 0": ElasticAverage(weights="dynamic", thresholds=(0.0, 0.05), warm_up=0),
    "known": ElasticAverage(weights="known"),
}
"""Of which a few trainings are made, for comparison."""
CHANNELS, FEATURES = (4, 8), 8 * 49
TRAIN, TEST, LOSSES = 12_000, 1_000, 300
EVALUATIONS = 12
SIDE_BY_SIDE = {"cpu": 48, "cuda": 2048}
"""Networks that train as rows of one product, by device."""
globals().update(smoke(TEST=50, LOSSES=20, EVALUATIONS=2))


def network() -> nn.Sequential:
    """Two convolutions, 5 x 5 and 3 x 3 with strides of 2, and a linear layer: 4,330 parameters."""
    first, second = CHANNELS
    return nn.Sequential(
        nn.Conv2d(1, first, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(FEATURES, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Pictures(Images):
    """Images with `network` for many replicas: a convolution with as many groups as there are replicas."""

    def initial(self, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [parameter.detach().clone() for parameter in network().parameters()]

    def logits(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        kernel, shift, second, second_shift, matrix, bias = parameters
        replicas, samples = inputs.shape[:2]
        maps = inputs.transpose(0, 1).reshape(samples, replicas, 28, 28)
        maps = F.conv2d(maps, kernel.flatten(0, 1), shift.flatten(), stride=2, padding=2, groups=replicas).relu()
        maps = F.conv2d(maps, second.flatten(0, 1), second_shift.flatten(), stride=2, padding=1, groups=replicas).relu()
        flat = maps.reshape(samples, replicas, FEATURES).transpose(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), flat, matrix.transpose(1, 2))

    def over_windows(self, diagonals: list[Tensor]) -> list[Tensor]:
        return [one.mean(dim=(3, 4), keepdim=True).expand_as(one) if one.dim() == 5 else one for one in diagonals]


@cache
def pictures(name: str) -> Pictures:
    """The part of a data set that is used; a word is printed where digits take its place."""
    images = load(name).part(TRAIN, TEST)
    return Pictures(images.name, images.train_x, images.train_y, images.test_x, images.test_y, side=28)


@dataclass(frozen=True)
class Part:
    """Trainings of one data set with one k, one tau and one kind of optimiser."""

    dataset: str
    workers: int
    cases: tuple[Case, ...]
    steps: int


Found = list[tuple[str, int, Result]]
"""Data set, k, and a training's curves."""


def case(rule: str, tau: int, overlap: float, optimiser: str, model: str, seed: int) -> Case:
    settings = (RULES | MORE_RULES)[rule]
    return Case(rule, replace(settings, tau=tau, overlap=overlap), optimiser, (FAILURES | STALE)[model], seed)


def in_parts(dataset: str, workers: int, cases: Iterable[Case], steps: int, device: str) -> list[Part]:
    """Cases that can train side by side, in parts that are quick by themselves."""
    kinds: dict[tuple[int, bool], list[Case]] = {}
    for one in cases:
        kinds.setdefault((one.settings.tau, one.optimiser == "adahessian"), []).append(one)
    size = max(1, SIDE_BY_SIDE[device.split(":")[0]] // workers)
    return [
        Part(dataset, workers, tuple(group[start : start + size]), steps)
        for group in kinds.values()
        for start in range(0, len(group), size)
    ]


def run_part(part: Part, device: str = "cpu") -> Found:
    images = pictures(part.dataset).to(torch.device(device))
    batch = Batch(images, part.cases, workers=part.workers, steps=part.steps, losses=LOSSES)
    return [(part.dataset, part.workers, result) for result in batch.train(EVALUATIONS, lambda amount: None)]


def run_all(parts: Sequence[Part], *, device: str = "cpu") -> Found:
    """All parts: one process a core, the longest parts first; on a GPU one after another in this one."""
    if device != "cpu" or len(parts) == 1:
        return [one for part in parts for one in run_part(part, device)]
    for dataset in {part.dataset for part in parts}:
        pictures(dataset)  # the processes have it from here
    order = sorted(parts, key=lambda part: part.cases[0].optimiser != "adahessian")
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(parts)), mp_context=context) as pool:
        found: Found = []
        for number, results in enumerate(pool.map(run_part, order), start=1):
            found += results
            print(f"{number} of {len(order)} parts of the grid", file=sys.stderr, flush=True)
        return found
