"""What crosses the network in a smaller format: what rounding costs, the same bits everywhere, and how many bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_process import Meeting, Threads
from paceline.gradients import Gradients, Header
from paceline.gradients.fleet_sums import WireSum, bytes_on_wire, start_sum
from paceline.settings import must_agree
from paceline.training.combines import check_backend, check_wire, make_combine
from paceline.transport import Alone
from paceline.transport.formats import FORMATS, SMALLEST, format_of
from paceline.transport.group import wait_for_all

LARGE = 40_000
"""Numbers of a tensor that is worth a format."""
STEP = {"bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 127}
"""Of a block's largest number (bf16, fp16: of each), the distance of two that can be written, at most."""


def numbers(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def in_threads(size: int, work: Any) -> list[Any]:
    """What ``work(transport)`` gives for each of so many workers."""
    meeting, results = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(meeting, rank))
        except BaseException as error:
            meeting.failure = error
            with meeting.changed:
                meeting.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        raise meeting.failure
    return results


def summed(size: int, name: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    def work(transport: Threads) -> torch.Tensor:
        tensor = parts[transport.rank].clone()
        wait_for_all([start_sum(transport, tensor, format_of(name))])
        return tensor

    return in_threads(size, work)


@pytest.mark.parametrize("name", FORMATS)
@given(count=st.integers(0, 9000), seed=st.integers(0, 99), size=st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]))
def test_what_is_written_reads_as_it_was_to_the_formats_precision(
    name: str, count: int, seed: int, size: float
) -> None:
    form, values = FORMATS[name], numbers(count, seed) * size
    row = torch.zeros(form.row_bytes(count), dtype=torch.uint8)
    form.encode(values, row)
    read = form.decode(row, count)
    assert read.dtype == torch.float32
    blocks = values.split(getattr(form, "block", 1))
    most = torch.cat([block.abs().max().expand_as(block) for block in blocks]) if count else values
    assert ((read - values).abs() <= most * STEP[name] * 0.51).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_has_the_same_bits_everywhere_and_the_wires_precision(name: str, size: int) -> None:
    parts = [numbers(LARGE + 13, rank) for rank in range(size)]
    results, exact = summed(size, name, parts), torch.stack(parts).double().sum(0)
    assert all(torch.equal(result, results[0]) for result in results)
    rounded = max(float(part.abs().max()) for part in [*parts, exact]) * STEP[name]
    assert float((results[0] - exact).abs().max()) <= rounded * (size + 1) * 0.51
    assert not torch.equal(results[0].double(), exact)


def test_sums_of_many_workers_lose_less_than_in_a_ring_that_adds_in_bfloat16() -> None:
    parts = [numbers(LARGE, rank) + 1 for rank in range(16)]
    exact = torch.stack(parts).double().sum(0)
    ring = parts[0].bfloat16()
    for part in parts[1:]:
        ring = ring + part.bfloat16()
    ours = summed(16, "bf16", parts)[0]
    assert (ours - exact).norm() < 0.6 * (ring.double() - exact).norm()


def test_numbers_that_fp16_could_not_hold_are_scaled_into_its_range() -> None:
    for size in (1e-9, 1e7):
        parts = [numbers(LARGE, rank) * size for rank in range(3)]
        exact = torch.stack(parts).double().sum(0)
        assert (summed(3, "fp16", parts)[0] - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinities_of_one_worker_reach_everybody(name: str, bad: float) -> None:
    parts = [numbers(LARGE, rank) for rank in range(3)]
    parts[1][17_000] = bad
    assert all(not result[17_000].isfinite() and result[0].isfinite() for result in summed(3, name, parts))


def test_small_tensors_and_others_than_large_numbers_are_sent_as_they_are() -> None:
    bf16, int8 = FORMATS["bf16"], FORMATS["int8"]
    assert bf16.serves(torch.zeros(LARGE))
    assert bf16.serves(torch.zeros(LARGE, dtype=torch.float64))
    assert not bf16.serves(torch.zeros(SMALLEST // 4))
    assert not bf16.serves(torch.zeros(LARGE, dtype=torch.int64))
    assert not bf16.serves(torch.zeros(LARGE, dtype=torch.float16))
    assert int8.serves(torch.zeros(LARGE, dtype=torch.float16))
    assert not isinstance(start_sum(Alone(), torch.zeros(LARGE), bf16), WireSum)


class Counting(Threads):
    """Counts what this worker sends to others."""

    sent = 0

    def all_to_all(self, sent: torch.Tensor, got: torch.Tensor) -> Any:
        self.sent += (self.size - 1) * sent.shape[1]
        return super().all_to_all(sent, got)


@pytest.mark.parametrize(("name", "part"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.25)])
@pytest.mark.parametrize("size", [2, 4])
def test_half_or_a_quarter_of_the_bytes_are_sent(name: str, part: float, size: int) -> None:
    def work(transport: Threads) -> int:
        counting = Counting(transport.meeting, transport.rank)
        wait_for_all([start_sum(counting, torch.ones(4 * LARGE), FORMATS[name])])
        return counting.sent

    ring = 2 * (size - 1) / size * 4 * 4 * LARGE
    assert all(part <= sent / ring < part * 1.02 for sent in in_threads(size, work))
    assert bytes_on_wire([torch.ones(4 * LARGE), torch.ones(5)], FORMATS[name]) == pytest.approx(
        part * 16 * LARGE + 20, rel=0.02
    )


# -- gradients ---------------------------------------------------------------------------------------------------------


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh(), torch.nn.Linear(200, 2)).to(dtype)


def one_step(gradients: Gradients, model: torch.nn.Module, x: torch.Tensor, clip: float | None) -> Header:
    rank, size = gradients._transport.rank, gradients._transport.size
    gradients.begin(len(x))
    shares = x.split([len(x) - 3 * (size - 1), *[3] * (size - 1)])
    gradients.backward(model(shares[rank]).square().mean(), len(shares[rank]), last=True)
    gradients.start_rest()
    header = Header(gradients.layout)
    header.write(rank, samples=len(shares[rank]), weight=len(shares[rank]), nonfinite=not gradients.finite())
    assert gradients.exchange.run(lambda: header, len(shares[rank]), "a round") is header
    gradients.mean(header, clip)
    return header


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("size", [2, 3])
def test_a_steps_gradient_equals_one_machines_to_the_wires_precision(name: str, clip: float | None, size: int) -> None:
    x = numbers(32 * 200, dtype=torch.float32).view(32, 200)

    models = [net() for _ in range(size)]  # before the threads, which share torch's random numbers

    def work(transport: Threads) -> list[torch.Tensor]:
        model = models[transport.rank]
        one_step(Gradients(transport, [model], wire_format=FORMATS[name]), model, x, clip)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    alone = net()
    one_step(Gradients(Alone(), [alone]), alone, x, clip)
    results, exact = in_threads(size, work), [p.grad for p in alone.parameters()]
    for grads in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, results[0], strict=True))
    error = torch.cat([(a - b).view(-1) for a, b in zip(results[0], exact, strict=True)]).norm()
    whole = torch.cat([grad.view(-1) for grad in exact]).norm()
    assert 0 < error / whole < STEP[name]


def test_a_worker_with_nan_is_named_whatever_the_wire() -> None:
    x = numbers(32 * 200, dtype=torch.float32).view(32, 200)
    x[-1] = float("nan")

    models = [net() for _ in range(3)]

    def work(transport: Threads) -> list[float]:
        model = models[transport.rank]
        return list(
            one_step(Gradients(transport, [model], wire_format=FORMATS["fp16"]), model, x, None).column("nonfinite")
        )

    assert in_threads(3, work) == [[0, 0, 1]] * 3


def test_a_round_with_a_deadline_crosses_the_same_wire() -> None:
    models = [net() for _ in range(3)]

    def work(transport: Threads) -> torch.Tensor:
        model = models[transport.rank]
        gradients = Gradients(transport, [model], wire_format=FORMATS["bf16"])
        gradients.begin(8)
        rows = numbers(8 * 200, transport.rank).view(8, 200)
        gradients.accumulation.join(gradients.accumulation.backward_apart(model(rows).square().mean(), 8))
        mine, header = gradients.close(8), Header(gradients.layout)
        own = mine.flats[0].clone()
        header.write(transport.rank, samples=8, weight=8)
        assert gradients.exchange.run_in_background(lambda: (header, mine), "a round") == (header, mine)
        return torch.stack([own, mine.flats[0]])

    results = in_threads(3, work)
    exact = torch.stack([own for own, _ in results]).double().sum(0)
    error = float((results[0][1] - exact).norm() / exact.norm())
    assert all(torch.equal(total, results[0][1]) for _, total in results)
    assert 1e-5 < error < 2**-8


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "combine", "said"),
    [
        ("bf8", "gradients", "unknown comm_dtype 'bf8'; known: float32, bf16, fp16, int8"),
        ("int8", "gradients", "too coarse for single gradients"),
        ("bf16", "elastic-average", "leave comm_dtype out, or use combine 'average'"),
    ],
)
def test_a_wire_that_does_not_exist_or_fit_is_refused(name: str, combine: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_wire(name, make_combine(combine))


@pytest.mark.parametrize(
    ("name", "combine"),
    [("float32", "elastic-average"), ("bf16", "gradients"), ("fp16", "average"), ("int8", "average")],
)
def test_the_others_fit(name: str, combine: str) -> None:
    check_wire(name, make_combine(combine))


def test_int8_is_refused_where_one_average_ends_all() -> None:
    import paceline

    with pytest.raises(ValueError, match="no later round makes that good"):
        check_wire("int8", paceline.Averaging(every="end"))


def test_nccl_keeps_its_own_wire() -> None:
    check_backend("float32", "nccl")
    with pytest.raises(ValueError, match="PACELINE_BACKEND=gloo"):
        check_backend("bf16", "nccl")


def test_a_worker_with_another_wire_is_told_so() -> None:
    def work(transport: Threads) -> None:
        must_agree(transport, "paceline.join()", {"comm_dtype": ("bf16", "float32")[transport.rank]})

    with pytest.raises(ValueError, match=r"comm_dtype is 'bf16' on worker 0 and 'float32' on worker 1"):
        in_threads(2, work)
