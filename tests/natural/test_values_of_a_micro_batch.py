"""What a script makes from one micro-batch, or counts by micro-batches: it is noticed where it reaches the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import outcomes, refusals, results

pytestmark = pytest.mark.fleet

LOOP = """
class Counts(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.calls = net, 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.net(x)

targets = torch.sin(x) @ torch.randn(4, 3, dtype=torch.float64)
rows = TensorDataset(x, y, targets)
with paceline.join() as fleet:
    model = fleet.model(Counts(network()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(rows, global_batch=16, micro_batch=3, epochs=1):
        for a, b, r in step:
            out = model(a)
            LOSS
            step.backward(loss)
        step.commit(optimizer)
    result = flat(model)
"""
F = "nn.functional."
VARIES = "is not the same in every micro-batch of a step"
UNLIKELY = "is divided by a tensor that is neither a count"
COUPLES = "the loss couples the samples"

NOTICED = {
    "a temperature by a counter of forward's": (f"loss = {F}cross_entropy(out / (2 - 0.03 * model.calls), b)", VARIES),
    "an exponent by a counter": (
        f"loss = ({F}cross_entropy(out, b, reduction='none') ** (1 + 0.1 * model.calls)).mean()",
        VARIES,
    ),
    "a factor inside the mean": (
        f"loss = ((1 + 0.1 * model.calls) * {F}cross_entropy(out, b, reduction='none')).mean()",
        VARIES,
    ),
    "class weights of the batch": (
        f"loss = {F}cross_entropy(out, b, weight=1 / (1 + torch.bincount(b, minlength=3).double()))",
        VARIES,
    ),
    "a bound of the batch": (
        "e = (out - r).abs(); d = e.detach().median(); loss = torch.where(e < d, e * e, d * (2 * e - d)).mean()",
        VARIES,
    ),
    "R2": ("loss = ((out - r) ** 2).sum() / ((r - r.mean(0)) ** 2).sum()", UNLIKELY),
    "a variance of the batch": (f"loss = {F}mse_loss(out, r) / r.var()", UNLIKELY),
    "the global batch in a tensor": (f"loss = {F}mse_loss(out, r, reduction='sum') / torch.tensor(160.0)", UNLIKELY),
    "farthest and nearest": (
        "d = torch.cdist(out, out); same = b[:, None] == b\n"
        f"            loss = {F}relu((d * same).max(1).values - (d + 9 * same).min(1).values + 1).mean()",
        COUPLES,
    ),
    "negatives from the batch": (
        f"loss = {F}relu(1 - out[:, 0] + out[:, 0][torch.arange(len(a)).flip(0)]).mean()",
        COUPLES,
    ),
}
RIGHT = {
    "a temperature by the step": f"loss = {F}cross_entropy(out / (2 + step.index), b)",
    "a constant variance": f"loss = {F}mse_loss(out, r) / targets.var()",
    "a count and a little": "m = (r > 0).double(); loss = ((out - r) ** 2 * m).sum() / (m.sum() + 1e-12)",
    "penalties on weights": (
        f"w = model.net[0].weight; loss = {F}cross_entropy(out, b) + w.abs().max()\n"
        "            loss = loss + ((w.T @ w - torch.eye(4)) ** 2).sum()"
    ),
    "label smoothing by hand": (
        "l = out[:, None].expand(len(a), 6, 3).repeat(1, 1, 4).log_softmax(-1).mean(-1)\n"
        "            m = (r[:, :1] > 0).double().expand(len(a), 6); loss = -(l * m).sum() / m.sum()"
    ),
}


@pytest.mark.parametrize("name", NOTICED)
def test_what_each_micro_batch_has_its_own_of_is_warned_of_once(tmp_path: Path, name: str) -> None:
    loss, said = NOTICED[name]
    ended = outcomes(tmp_path, LOOP.replace("LOSS", loss), PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    assert ended[0].err.count(said) == 1


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_left_alone_and_are_one_process_s(tmp_path: Path, name: str) -> None:
    script = LOOP.replace("LOSS", RIGHT[name])
    ended = outcomes(tmp_path / "two", script, PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    assert "warning" not in ended[0].err
    alone = results(tmp_path / "one", script.replace("micro_batch=3", "micro_batch=16"), workers=1)[0]
    assert max(abs(a - b) for a, b in zip(ended[0].value, alone, strict=True)) < 1e-12


CODE_BOOK = """
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2).double(), nn.Linear(2, 4).double()
        BOOK

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.book).argmin(1)
        with torch.no_grad():
            for code in nearest.unique():
                CHANGE
        q = z + (self.book[nearest] - z).detach()
        return self.decoder(q), (z - self.book[nearest].detach()).square().mean()

with paceline.join() as fleet:
    torch.manual_seed(5)
    model = fleet.model(Quantised())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in fleet.steps(data, global_batch=16, micro_batch=3, epochs=3):
        for a, b in step:
            out, commitment = model(a)
            step.backward((out - a).square().mean() + 0.25 * commitment)
        step.commit(optimizer)
    result = [model.book.tolist(), flat(model.encoder)]
"""
BUFFER = 'self.register_buffer("book", torch.randn(5, 2).double())'
PARAMETER = "self.book = nn.Parameter(torch.randn(5, 2).double(), requires_grad=False)"


def test_a_code_book_that_forward_moves_through_its_data_is_shared_and_warned_of(tmp_path: Path) -> None:
    script = CODE_BOOK.replace("BOOK", BUFFER).replace("CHANGE", "self.book.data[code] = z[nearest == code].mean(0)")
    ended = outcomes(tmp_path, script, PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    assert ended[0].value == ended[1].value
    assert ended[0].err.count("forward changes the buffer book in every micro-batch") == 1


def test_a_code_book_that_is_a_parameter_is_refused_with_what_to_write(tmp_path: Path) -> None:
    script = CODE_BOOK.replace("BOOK", PARAMETER).replace("CHANGE", "self.book[code] = z[nearest == code].mean(0)")
    assert "parameter book, which is not trained, changed" in refusals(tmp_path, script, PACELINE_PACE="fixed:1,3")


def test_models_that_take_turns_by_micro_batches_are_warned_of(tmp_path: Path) -> None:
    script = """
    with paceline.join() as fleet:
        one, other = fleet.model(network()), fleet.model(network())
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        for step in fleet.steps(data, global_batch=16, micro_batch=3, epochs=1):
            for number, (a, b) in enumerate(step):
                step.backward(loss_fn((one if number % 2 else other)(a), b))
            step.commit(optimizer)
        result = flat(one, other)
    """
    ended = outcomes(tmp_path, script, PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    assert ended[0].err.count("micro-batches of one step trained unlike models") == 1
