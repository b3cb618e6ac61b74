"""The batched replicas of the elastic-average benchmark, held against one network at a time."""

import gzip
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.research.elastic_average import ElasticAverage

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _replicas as replicas

WORKERS = 3


@pytest.fixture(scope="module")
def images() -> replicas.Images:
    pytest.importorskip("sklearn")
    return replicas.digits()


def batch(images: replicas.Images, optimiser: str, failures: str = "", **settings: object) -> replicas.Batch:
    rule = ElasticAverage(weights="fixed", **settings)  # type: ignore[arg-type]
    cases = [replicas.Case("fixed", rule, optimiser, failures, seed) for seed in (0, 1)]
    return replicas.Batch(images, cases, workers=WORKERS, steps=6)


def lone(parameters: list[torch.Tensor], row: int) -> tuple[nn.Module, list[nn.Parameter]]:
    """The same network in plain torch: a convolution and a linear layer, with replica ``row``'s parameters."""
    kernel, shift, matrix, bias = (part[row].detach() for part in parameters)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    own = list(net.parameters())
    with torch.no_grad():
        for parameter, value in zip(own, (kernel.T.reshape(8, 1, 3, 3), shift, matrix.T, bias), strict=True):
            parameter.copy_(value)
    return net, own


def centres_of(patches: torch.Tensor) -> torch.Tensor:
    """Images from their patches: the middle of every window."""
    return patches[..., 4].reshape(-1, 1, 8, 8)


def test_each_replica_computes_what_the_network_by_itself_does(images: replicas.Images) -> None:
    run = batch(images, "sgd")
    patches = images.test[:5].expand(2 * WORKERS, 5, *images.test.shape[1:])
    together = replicas.logits(run.parameters, patches, images.side)
    for row in (0, 4):
        net, _ = lone(run.parameters, row)
        torch.testing.assert_close(together[row], net(centres_of(images.test[:5])), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_adahessian_in_the_batch_equals_the_package_s_on_each_network(images: replicas.Images) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    run = batch(images, "adahessian")
    row, trains = 4, torch.ones(2 * WORKERS, dtype=torch.bool)
    net, own = lone(run.parameters, row)
    optimizer = package.AdaHessian(own, lr=replicas.HESSIAN_LR, betas=replicas.BETAS, eps=replicas.EPS)
    for _ in range(3):
        rows, signs = run._deal(), run._signs()
        run._deal, run._signs = (lambda rows=rows: rows), (lambda signs=signs: signs)
        run._local_step(trains)
        del run._deal, run._signs
        loss = nn.functional.cross_entropy(net(centres_of(images.train[rows[row]])), images.train_labels[rows[row]])
        gradients = torch.autograd.grad(loss, own, create_graph=True)
        kernel, shift, matrix, bias = (part[row] for part in signs)
        found = torch.autograd.grad(gradients, own, [kernel.T.reshape(8, 1, 3, 3), shift, matrix.T, bias])
        estimates = [part.abs() for part in found]
        estimates[0] = estimates[0].mean(dim=(2, 3), keepdim=True).expand_as(estimates[0])
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient.detach()
        optimizer.step(hessian=estimates)
    _, expected = lone(run.parameters, row)
    for mine, other in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4)


def test_a_replica_that_stands_still_does_not_move(images: replicas.Images) -> None:
    for optimiser in ("sgd", "nesterov", "adahessian"):
        run = batch(images, optimiser)
        before = [part.detach().clone() for part in run.parameters]
        trains = torch.arange(2 * WORKERS) != 2
        run._local_step(trains)
        moved = [bool((a[row] != b[row]).any()) for row in range(6) for a, b in [(run.parameters[2], before[2])]]
        assert moved == trains.tolist()


def test_an_exchange_follows_the_formula(images: replicas.Images) -> None:
    run = batch(images, "sgd", alpha=0.2)
    run._local_step(torch.ones(2 * WORKERS, dtype=torch.bool))
    centre, points = run.centre[2].clone(), run.parameters[2].detach().clone()
    present = torch.tensor([[True, True, False], [True, True, True]])
    run._exchange(present.numpy())
    ways = points.view(2, WORKERS, *points.shape[1:]) - centre.unsqueeze(1)
    there = present.view(2, WORKERS, 1, 1)
    torch.testing.assert_close(run.centre[2], centre + 0.2 * (ways * there).sum(1))
    torch.testing.assert_close(run.parameters[2].detach(), points - 0.2 * (ways * there).flatten(0, 1))


def test_overlap_gives_everybody_the_common_part_and_deals_the_rest_once() -> None:
    pieces = replicas.shards(1000, 4, 0.25, seed=3)
    assert pieces.shape == (4, 250 + 750 // 4)
    counts = torch.bincount(pieces.flatten(), minlength=1000)
    assert (counts == 4).sum() == 250
    assert (counts == 1).sum() == 4 * (750 // 4)
    assert torch.bincount(replicas.shards(1000, 4, 0.0, seed=3).flatten()).max() == 1


def test_idx_files_are_read_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\0\0\0\x02\0\0\0\x01\0\0\0\x03" + bytes(range(6))))
    assert replicas.read_idx(path).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    path.write_bytes(gzip.compress(b"PNG!"))
    with pytest.raises(ValueError, match="not an IDX file"):
        replicas.read_idx(path)
