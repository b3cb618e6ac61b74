"""Elastic averaging with all replicas of all cases in one process: every parameter is one tensor over replicas.

A *case* is one training: a rule of weights, a local optimiser, a failure model, a seed. Cases with the same number of
workers and the same tau train side by side as rows of the same matrix products, so hundreds of small networks cost
little more than one. The rules and failures are the library's own (`paceline.research.ElasticAverage`,
`paceline.machines.failures`); only the training loop is written for the batch.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F

from paceline.machines.failures import Trouble, parse_failures
from paceline.research.elastic_average import ElasticAverage

CHANNELS, CLASSES = 8, 10
BATCH = 16
"""Samples of one local step of one worker."""
SGD_LR, NESTEROV_LR, MOMENTUM = 0.1, 0.02, 0.9
HESSIAN_LR, BETAS, EPS = 0.05, (0.9, 0.999), 1e-4
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Images:
    """A dataset as the patches its 3 x 3 convolution sees: samples x positions x 9."""

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    side: int
    """Positions along an edge after the convolution."""

    def to(self, device: torch.device) -> Images:
        names = ("train", "train_labels", "test", "test_labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def initial(self, seed: int) -> list[Tensor]:
        """Parameters of one network for these images."""
        return initial(self, seed)

    def logits(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        """Of networks whose parameters have a leading dimension of replicas; ``inputs`` replicas x samples x ..."""
        return logits(parameters, inputs, self.side)

    def over_windows(self, diagonals: list[Tensor]) -> list[Tensor]:
        """The Hessian's diagonal, averaged over the window of every kernel: here the first's 3 x 3."""
        return [diagonals[0].mean(dim=1, keepdim=True).expand_as(diagonals[0]), *diagonals[1:]]


@dataclass(frozen=True)
class Case:
    """One training to run."""

    name: str
    settings: ElasticAverage
    optimiser: str
    """``sgd``, ``nesterov`` or ``adahessian``."""
    failures: str
    seed: int


@dataclass
class Result:
    case: Case
    curve: list[float] = field(default_factory=list)
    """Test accuracy of the centre, evenly spaced over the rounds."""
    losses: list[float] = field(default_factory=list)
    """Training loss of the centre at the same rounds, where it was asked for."""

    @property
    def final(self) -> float:
        """Mean over the last fifth of the curve: one restart just before the end should not decide."""
        tail = max(1, len(self.curve) // 5)
        return float(np.mean(self.curve[-tail:]))

    @property
    def area(self) -> float:
        """Area under the curve, as a mean accuracy over the whole training."""
        return float(np.mean(self.curve))


# -- data -------------------------------------------------------------------------------------------------------------


def digits() -> Images:
    """scikit-learn's digits: 1,437 to train on and 360 to test with."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return _images("digits", images[:1437], labels[:1437], images[1437:], labels[1437:], stride=1)


def fashion_folder() -> Path | None:
    """Where Debian's package dataset-fashion-mnist has put its files, if it is installed. Nothing is downloaded."""
    found = sorted(Path("/usr/share").glob("dataset*/**/train-images-idx3-ubyte.gz"))
    return next((path.parent for path in found if "fashion" in str(path)), None)


def fashion(folder: Path, *, train: int = 12_000, test: int = 2_000) -> Images:
    """A part of Fashion-MNIST, large enough for small networks."""
    images, labels = (read_idx(folder / f"train-{kind}-ubyte.gz")[:train] for kind in ("images-idx3", "labels-idx1"))
    unseen, truth = (read_idx(folder / f"t10k-{kind}-ubyte.gz")[:test] for kind in ("images-idx3", "labels-idx1"))
    return _images("fashion-mnist", images / 255, labels.long(), unseen / 255, truth.long(), stride=2)


def read_idx(path: Path) -> Tensor:
    """An IDX file of bytes: two zeros, type 8, the number of dimensions, their sizes (big-endian), the data."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(raw, dtype=">u4", count=raw[3], offset=4).astype(int)
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy()).float()


def _images(name: str, train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, *, stride: int) -> Images:
    patches, unseen = _patches(train, stride), _patches(test, stride)
    return Images(name, patches, labels, unseen, truth, side=round(patches.shape[1] ** 0.5))


def _patches(images: Tensor, stride: int) -> Tensor:
    return F.unfold(images.unsqueeze(1), 3, padding=1, stride=stride).transpose(1, 2).contiguous()


def shards(samples: int, workers: int, overlap: float, seed: int) -> Tensor:
    """P4's data overlap: a common part of ``overlap * N`` samples for everybody, the rest dealt; workers x samples."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1000 + seed))
    common, rest = order[: round(overlap * samples)], order[round(overlap * samples) :]
    each = len(rest) // workers
    return torch.stack([torch.cat([common, rest[worker * each : (worker + 1) * each]]) for worker in range(workers)])


# -- the network: convolution (as a product with patches), ReLU, 2 x 2 maximum, linear --------------------------------


def initial(images: Images, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = CHANNELS * (images.side // 2) ** 2
    shapes = ((9, CHANNELS), (CHANNELS,), (features, CLASSES), (CLASSES,))
    return [
        torch.randn(shape, generator=generator) * (2 / shape[0]) ** 0.5 if len(shape) == 2 else torch.zeros(shape)
        for shape in shapes
    ]


def logits(parameters: Sequence[Tensor], patches: Tensor, side: int) -> Tensor:
    """Parameters with a leading dimension of replicas; ``patches`` replicas x samples x positions x 9."""
    kernel, shift, matrix, bias = parameters
    replicas, samples, positions, _ = patches.shape
    maps = torch.baddbmm(shift.unsqueeze(1), patches.reshape(replicas, samples * positions, 9), kernel).relu()
    pooled = F.max_pool2d(maps.reshape(-1, side, side, CHANNELS).permute(0, 3, 1, 2), 2)
    return torch.baddbmm(bias.unsqueeze(1), pooled.reshape(replicas, samples, -1), matrix)


# -- local optimisers, row by row -------------------------------------------------------------------------------------


class Momentum:
    """SGD, with Nesterov momentum where a replica's momentum is above 0."""

    second_order = False

    def __init__(self, parameters: Sequence[Tensor], lr: Tensor, momentum: Tensor) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity = [torch.zeros_like(p) for p in parameters]

    def updates(self, gradients: Sequence[Tensor], active: Tensor) -> list[Tensor]:
        moves = []
        for velocity, gradient in zip(self.velocity, gradients, strict=True):
            lr, momentum = _rows(self.lr, gradient), _rows(self.momentum, gradient)
            velocity.copy_(torch.where(_rows(active, gradient), momentum * velocity + gradient, velocity))
            moves.append(-lr * (gradient + momentum * velocity))
        return moves

    def fade(self, kept: Tensor) -> None:
        for velocity in self.velocity:
            velocity.mul_(_rows(kept, velocity))

    reset = fade


class AdaHessian:
    """D = |Hz| with one Rademacher z, its mean over the kernel window, and Adam's averages of g and D^2."""

    second_order = True

    def __init__(self, parameters: Sequence[Tensor], *, lr: float = HESSIAN_LR, eps: float = EPS) -> None:
        self.lr, self.eps = lr, eps
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]
        self.steps = torch.zeros(len(parameters[0]), device=parameters[0].device)

    def updates(self, gradients: Sequence[Tensor], active: Tensor, curvature: Sequence[Tensor]) -> list[Tensor]:
        first, second = BETAS
        self.steps += active
        moves = []
        for mean, square, gradient, diagonal in zip(self.mean, self.square, gradients, curvature, strict=True):
            rows = _rows(active, gradient)
            mean.copy_(torch.where(rows, first * mean + (1 - first) * gradient, mean))
            square.copy_(torch.where(rows, second * square + (1 - second) * diagonal**2, square))
            steps = _rows(self.steps.clamp(min=1), gradient)
            size = (square / (1 - second**steps)).sqrt() + self.eps
            moves.append(-self.lr * mean / (1 - first**steps) / size)
        return moves

    def fade(self, kept: Tensor) -> None:
        for mean in self.mean:
            mean.mul_(_rows(kept, mean))

    def reset(self, kept: Tensor) -> None:
        self.fade(kept)
        for square in self.square:
            square.mul_(_rows(kept, square))
        self.steps *= kept


def curvature(gradients: Sequence[Tensor], parameters: Sequence[Tensor], signs: Sequence[Tensor]) -> list[Tensor]:
    """|Hz| of every replica at once: their Hessians are blocks of one."""
    return [product.abs() for product in torch.autograd.grad(gradients, parameters, signs)]


# -- training ---------------------------------------------------------------------------------------------------------


class Batch:
    """Cases that train side by side; all have ``workers`` workers, one tau, and one kind of optimiser."""

    def __init__(self, images: Images, cases: Sequence[Case], *, workers: int, steps: int, losses: int = 0) -> None:
        """``losses``: on how many samples the training loss is measured; 0: it is not."""
        self.losses = losses
        self.images, self.cases, self.workers = images, list(cases), workers
        self.tau = cases[0].settings.tau
        self.rounds = steps // self.tau
        starts = [images.initial(case.seed) for case in cases]
        self.device = images.train.device
        self.centre = [torch.stack(parts).to(self.device) for parts in zip(*starts, strict=True)]
        self.first = [part.repeat_interleave(workers, 0) for part in self.centre]
        self.parameters = [part.clone().requires_grad_() for part in self.first]
        self.optimiser = self._optimiser()
        self.memories = [case.settings.memory(workers) for case in cases]
        self.fates = [parse_failures(case.failures, seed=case.seed) for case in cases]
        pieces = [shards(len(images.train), workers, case.settings.overlap, case.seed) for case in cases]
        self.sizes = self._put([piece.shape[1] for piece in pieces]).repeat_interleave(workers)
        widest = int(self.sizes.max())
        self.shards = torch.cat([F.pad(piece, (0, widest - piece.shape[1])) for piece in pieces]).to(self.device)
        self.draws = {case.seed: torch.Generator().manual_seed(case.seed) for case in cases}

    def _optimiser(self) -> Momentum | AdaHessian:
        kinds = [case.optimiser for case in self.cases for _ in range(self.workers)]
        if kinds[0] == "adahessian":
            return AdaHessian(self.parameters)
        rate = {"sgd": SGD_LR, "nesterov": NESTEROV_LR}
        momentum = {"sgd": 0.0, "nesterov": MOMENTUM}
        rates, momenta = (self._put([table[kind] for kind in kinds]) for table in (rate, momentum))
        return Momentum(self.parameters, rates, momenta)

    def train(self, evaluations: int, progress: Progress) -> list[Result]:
        results = [Result(case) for case in self.cases]
        marks = {round(self.rounds * (mark + 1) / evaluations) - 1 for mark in range(evaluations)}
        for number in range(self.rounds):
            fates = [f.at(worker=w, round=number) for f in self.fates for w in range(self.workers)]
            self._return(fates)
            trains = self._put([fate.trains for fate in fates])
            for _ in range(self.tau):
                self._local_step(trains)
            self._exchange(np.array([fate.exchanges for fate in fates]).reshape(-1, self.workers))
            if number in marks:
                for result, accuracy in zip(results, self.accuracy(), strict=True):
                    result.curve.append(accuracy)
                for result, loss in zip(results, self.loss() if self.losses else (), strict=False):
                    result.losses.append(loss)
            progress(self.tau * len(self.cases) * self.workers)
        return results

    @torch.no_grad()
    def _return(self, fates: Sequence[Trouble]) -> None:
        """Model C: who comes back has its initial weights (or its old ones) and a new optimiser."""
        back = self._put([fate.returns_with is not None for fate in fates])
        if not back.any():
            return
        anew = self._put([fate.returns_with == "initial" for fate in fates])
        for parameter, first in zip(self.parameters, self.first, strict=True):
            parameter.copy_(torch.where(_rows(anew, first), first, parameter))
        self.optimiser.reset((~back).float())

    def _local_step(self, trains: Tensor) -> None:
        rows = self._deal()
        patches, labels = self.images.train[rows], self.images.train_labels[rows]
        out = self.images.logits(self.parameters, patches)
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum") / BATCH
        second = self.optimiser.second_order
        gradients = torch.autograd.grad(loss, self.parameters, create_graph=second)
        more = (self._curvature(gradients),) if second else ()
        with torch.no_grad():
            moves = self.optimiser.updates([g.detach() for g in gradients], trains, *more)
            for parameter, move in zip(self.parameters, moves, strict=True):
                parameter.add_(move * _rows(trains, move))

    def _curvature(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self.images.over_windows(curvature(gradients, self.parameters, self._signs()))

    def _deal(self) -> Tensor:
        """The same draws for all cases of one seed: rules are compared on the same batches."""
        drawn = {seed: torch.rand(self.workers, BATCH, generator=draw) for seed, draw in self.draws.items()}
        places = torch.cat([drawn[case.seed] for case in self.cases]).to(self.device) * self.sizes.unsqueeze(1)
        return self.shards.gather(1, places.long())

    def _signs(self) -> list[Tensor]:
        shapes = [(self.workers, *part.shape[1:]) for part in self.first]
        drawn = {seed: [_rademacher(shape, draw) for shape in shapes] for seed, draw in self.draws.items()}
        return [
            torch.cat(parts).to(self.device) for parts in zip(*(drawn[case.seed] for case in self.cases), strict=True)
        ]

    @torch.no_grad()
    def _exchange(self, present: np.ndarray) -> None:
        ways = [p - c.repeat_interleave(self.workers, 0) for p, c in zip(self.parameters, self.centre, strict=True)]
        lengths = torch.stack([way.flatten(1).square().sum(1) for way in ways]).sum(0).sqrt()
        distances = lengths.double().cpu().numpy().reshape(-1, self.workers)
        pulls, pushes, kept = [], [], []
        for case, memory, distance, there in zip(self.cases, self.memories, distances, present, strict=True):
            exchange = case.settings.weigh(memory, distance, there)
            pulls.append(exchange.pull)
            pushes.append(exchange.push)
            kept.append(np.where(there, case.settings.momentum_kept(exchange.pull, self.workers), 1.0))
        pull, push, left = (self._put(np.concatenate(parts)).float() for parts in (pulls, pushes, kept))
        for parameter, centre, way in zip(self.parameters, self.centre, ways, strict=True):
            parameter.sub_(_rows(pull, way) * way)
            centre.add_((_rows(push, way) * way).view(-1, self.workers, *way.shape[1:]).sum(1))
        if (left < 1).any():
            self.optimiser.fade(left)

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        patches = self.images.test.expand(len(self.cases), *self.images.test.shape)
        right = self.images.logits(self.centre, patches).argmax(2) == self.images.test_labels
        return [float(part) for part in right.float().mean(1).cpu()]

    @torch.no_grad()
    def loss(self) -> list[float]:
        """Training loss of each centre."""
        inputs, labels = self.images.train[: self.losses], self.images.train_labels[: self.losses]
        out = self.images.logits(self.centre, inputs.expand(len(self.cases), *inputs.shape))
        each = F.cross_entropy(out.flatten(0, 1), labels.repeat(len(self.cases)), reduction="none")
        return [float(part) for part in each.view(len(self.cases), -1).mean(1).cpu()]

    def _put(self, values: ArrayLike) -> Tensor:
        return torch.as_tensor(values, device=self.device)


def _rademacher(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(0, 2, tuple(shape), generator=generator) - 1


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """One value a replica, shaped to multiply ``like``."""
    return values.view(-1, *[1] * (like.dim() - 1))
