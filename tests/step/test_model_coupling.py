"""Models that mix the samples of a batch, and such as look alike and do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.step.losses.coupling import LEAST, mixing

ROWS = 4


class Net(nn.Module):
    """A body, what is done with its output, and a head."""

    def __init__(self, body: nn.Module, between: Callable[..., torch.Tensor], size: int = 8) -> None:
        super().__init__()
        self.body, self.between, self.head = body, between, nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.body(x)))  # type: ignore[no-any-return]


def orthogonal(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.utils.parametrizations.orthogonal(layer))


class Masked(nn.TransformerEncoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(
            x, src_key_padding_mask=torch.arange(x.shape[1])[None] >= torch.tensor([[4], [2], [3], [4]])
        )


def masked() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), Masked(12, 2, 16, dropout=0.0, batch_first=True))


class Packed(nn.Module):
    """Texts of unlike lengths, packed by their length, so that they lie in another order meanwhile."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.first, self.lstm, self.mixed = nn.Linear(5, 8), nn.LSTM(8, 8, batch_first=True), mixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([2, 6, 3, 5])
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        h: torch.Tensor = self.lstm(packed)[1][0][-1]
        return h - h.mean(0) if self.mixed else h


def by_hand(h: torch.Tensor) -> torch.Tensor:
    return (h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-5)


def last(found: tuple[torch.Tensor, object]) -> torch.Tensor:
    return found[0][:, -1]


def layer(batch_first: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first))


def recurrent(batch_first: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 4), nn.LSTM(4, 8, batch_first=batch_first))


class PackedTexts(nn.Module):
    """A recurrence over texts of unlike lengths, which torch sorts, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(20, 4), nn.GRU(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([2, 6, 3, 5])
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1][0]  # type: ignore[no-any-return]


PICTURES = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten())
NORMED = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
TOKENS = torch.randint(0, 20, (ROWS, 6))


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Net(nn.Linear(5, 8), by_hand), torch.randn(ROWS, 5)),
        (Net(nn.Linear(ROWS, 8), by_hand), torch.randn(ROWS, ROWS)),
        (Net(nn.Linear(5, 8), lambda h: h + h.max(0).values), torch.randn(ROWS, 5)),
        (Net(nn.LSTM(5, 8), last), torch.randn(ROWS, 6, 5)),
        (Net(recurrent(False), last), TOKENS),
        (Net(layer(False), lambda h: h.mean(1)), torch.randn(ROWS, 7, 5)),
        (Net(nn.Linear(5, 8), lambda h: 0.7 * h + 0.3 * h[torch.tensor([2, 3, 0, 1])]), torch.randn(ROWS, 5)),
        (Net(Packed(mixed=True), torch.tanh), torch.randn(ROWS, 6, 5)),
    ],
    ids=[
        "standardised by hand",
        "as many features as samples",
        "the largest",
        "an LSTM along the samples",
        "of tokens",
        "a Transformer",
        "hidden samples mixed up",
        "packed, and a mean",
    ],
)
def test_a_model_that_mixes_samples_is_found_and_its_gradients_stay_as_they_are(net: Net, x: torch.Tensor) -> None:
    state = torch.get_rng_state()
    loss = nn.functional.cross_entropy(net(x), torch.tensor([0, 1, 2, 1]))
    loss.backward(retain_graph=True)
    before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    drawn = torch.get_rng_state()
    assert float(mixing(loss, ROWS)) > LEAST
    assert torch.equal(torch.get_rng_state(), drawn)
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(net.parameters(), before, strict=True))
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Net(nn.Linear(5, 8), torch.tanh), torch.randn(ROWS, 5)),
        (Net(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Dropout()), torch.relu), torch.randn(ROWS, 5)),
        (Net(nn.LSTM(5, 8, batch_first=True), last), torch.randn(ROWS, 6, 5)),
        (Net(nn.LSTM(5, 8), lambda found: found[0][-1]), torch.randn(6, ROWS, 5)),
        (Net(recurrent(True), last), TOKENS),
        (Net(layer(True), lambda h: h.mean(1)), torch.randn(ROWS, 7, 5)),
        (Net(layer(False), lambda h: h.mean(0)), torch.randn(7, ROWS, 5)),
        (Net(PICTURES, torch.relu, 72), torch.randn(ROWS, 3, 8, 8)),
        (Net(NORMED, torch.relu, 288), torch.randn(ROWS, 3, 8, 8)),
        (Net(nn.Linear(5, 8), lambda h: checkpoint(torch.tanh, h, use_reentrant=False)), torch.randn(ROWS, 5)),
        (Net(nn.Linear(5, 8), lambda h: checkpoint(torch.tanh, h, use_reentrant=True)), torch.randn(ROWS, 5)),
        (Net(orthogonal(nn.Linear(8, ROWS)), torch.tanh, ROWS), torch.randn(ROWS, 5)),
        (Net(masked(), lambda h: h.mean(1), 12), torch.randn(ROWS, ROWS, 5)),
        (Net(PackedTexts(), torch.tanh), TOKENS),
        (Net(Packed(), torch.tanh), torch.randn(ROWS, 6, 5)),
    ],
    ids=[
        "a network",
        "a norm of each",
        "batch_first",
        "time first",
        "of tokens",
        "a Transformer",
        "a Transformer, time first",
        "convolutions",
        "batch norm",
        "a checkpoint",
        "an older checkpoint",
        "a weight made of a square matrix",
        "as many tokens as samples",
        "packed texts",
        "packed by length",
    ],
)
def test_one_that_does_not_or_is_known_to_is_passed_over(net: Net, x: torch.Tensor) -> None:
    loss = nn.functional.cross_entropy(net(x), torch.tensor([0, 1, 2, 1]))
    assert float(mixing(loss, ROWS)) == 0.0
    loss.backward()
