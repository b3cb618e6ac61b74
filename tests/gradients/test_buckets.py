"""Gradients in flat buckets: grouped by kind and size, started in one order, final when they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import MisuseError
from paceline.gradients import buckets as module
from paceline.gradients.buckets import BUCKET_BYTES, FIRST_BYTES, Bucket, Buckets, divide, group

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Wire:
    """Notes what a bucket held when its sum was started, and sums nothing."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.flats: list[torch.Tensor] = []

    def __call__(self, flat: torch.Tensor) -> None:
        self.sent.append(flat.clone())
        self.flats.append(flat)

    def final(self) -> bool:
        """Whether nothing came after a bucket had been started."""
        return all(torch.equal(then, now) for then, now in zip(self.sent, self.flats, strict=True))


def parameters(*sizes: int) -> list[nn.Parameter]:
    """Parameters that take no memory: only their sizes matter."""
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=12, max_size=12),
)
def test_a_group_has_one_kind_and_the_reverse_order_and_every_parameter_is_in_one(sizes: Any, dtypes: Any) -> None:
    given_ = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in zip(sizes, dtypes)]
    order = {id(parameter): number for number, parameter in enumerate(given_)}
    groups = group(given_)
    for one in groups:
        assert len({parameter.dtype for parameter in one}) == 1
        numbers = [order[id(parameter)] for parameter in one]
        assert numbers == sorted(numbers, reverse=True)
    assert sorted(order[id(p)] for one in groups for p in one) == list(range(len(given_)))


def test_the_first_bucket_is_small_and_the_others_are_large() -> None:
    quarter_megabyte = 1 << 16  # float32 numbers
    groups = group(parameters(*[quarter_megabyte] * 300))
    sizes = [sum(p.numel() * p.element_size() for p in one) for one in groups]
    assert sizes[0] == FIRST_BYTES
    assert sizes[1:-1] == [BUCKET_BYTES] * (len(sizes) - 2)
    assert 0 < sizes[-1] <= BUCKET_BYTES


def test_one_huge_parameter_is_one_bucket() -> None:
    huge = BUCKET_BYTES // 4 + 1
    assert [len(one) for one in group(parameters(1, huge, 1))] == [2, 1]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def many_buckets(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> tuple[Buckets, Wire]:
    """A bucket for every parameter or two."""
    monkeypatch.setattr(module, "FIRST_BYTES", 16)
    monkeypatch.setattr(module, "BUCKET_BYTES", 16)
    wire = Wire()
    return Buckets(list(model.parameters()), wire), wire


def test_gradients_add_up_over_micro_batches_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = net(), net()
    buckets, wire = many_buckets(monkeypatch, model)
    for _ in range(3):
        wire.sent.clear()
        wire.flats.clear()
        expected.zero_grad()
        for number, part in enumerate(X.split(2)):
            buckets.backward(model(part).sum(), last=number == 2)
            expected(part).sum().backward()
        buckets.start_rest()
        buckets.expose(buckets.used())
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        assert wire.final()
        buckets.clear()
        assert all(p.grad is None for p in model.parameters())


def test_every_worker_starts_the_same_sums_in_the_same_order_whatever_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    for share in (0, 1, 3):
        model = net()
        buckets, wire = many_buckets(monkeypatch, model)
        for _ in range(2):
            wire.sent.clear()
            for number in range(share):
                buckets.backward(model(X).sum(), last=number == share - 1)
            buckets.start_rest()
            shapes.append([flat.shape for flat in wire.sent])
            if not share:
                assert all(not flat.any() for flat in wire.sent), "a worker with no micro-batch sends zeros"
            buckets.clear()
    assert len(shapes[0]) > 1
    assert all(shape == shapes[0] for shape in shapes)


def test_sums_start_while_the_last_backward_is_under_way_once_a_step_has_shown_it_is_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    buckets, wire = many_buckets(monkeypatch, model)
    started = []
    for _ in range(3):
        wire.sent.clear()
        buckets.backward(model(X).sum(), last=False)
        assert wire.sent == []
        buckets.backward(model(X).sum(), last=True)
        started.append(len(wire.sent))
        buckets.start_rest()
        buckets.clear()
    assert started[0] == 0
    assert started[1] == started[2] == len(buckets.buckets) > 1


def test_a_section_is_summed_before_its_bucket_is_complete_where_sums_travel_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_BYTES", 1 << 20)
    monkeypatch.setattr(module, "SECTIONS", 1 << 17)
    shapes: dict[bool, list[list[int]]] = {}
    for in_sections in (True, False):
        for share in (1, 0):
            model, wire, seen = net(), Wire(), list[int]()
            buckets = Buckets(list(model.parameters()), wire, in_sections=lambda: in_sections)  # noqa: B023
            model[0].weight.register_hook(lambda _: seen.append(len(wire.sent)))  # noqa: B023
            for _ in range(2):
                wire.sent.clear()
                wire.flats.clear()
                if share:
                    buckets.backward(model(X).sum(), last=True)
                buckets.start_rest()
                assert wire.final()
                shapes.setdefault(in_sections, []).append([flat.numel() for flat in wire.sent])
                buckets.clear()
            if share:
                assert seen == ([0, 3] if in_sections else [0, 0]), "sums under way before the last gradient"
    assert shapes[True] == [[1, 3, 3, 12]] * 4, "one per section, whoever had a share"
    assert shapes[False] == [[19]] * 4


def test_a_section_ends_with_the_parameter_that_fills_it_and_none_is_empty() -> None:
    sizes = [20, 0, 5, 5, 40, 3, 0]
    bucket = Bucket([nn.Parameter(torch.zeros(size)) for size in sizes])
    sections = divide(bucket, section_bytes=40)
    assert [(one.begin, one.end, len(one.slots)) for one in sections] == [
        (0, 20, 2),
        (20, 30, 2),
        (30, 70, 1),
        (70, 73, 2),
    ]
    assert all(slot.section is one for one in sections for slot in one.slots)


def test_a_gradient_left_over_from_the_last_step_is_not_sent_for_an_unused_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    buckets, wire = many_buckets(monkeypatch, model)
    for use_all in (True, False):
        wire.sent.clear()
        buckets.backward((model(X) if use_all else model[:2](X)).sum(), last=True)
        buckets.start_rest()
        used = buckets.used()
        buckets.expose(used)
        assert used == [True, True, use_all, use_all]
        assert (model[2].weight.grad is not None) == use_all
        if not use_all:
            total = sum(float(flat.abs().sum()) for flat in wire.sent)
            assert total == pytest.approx(float(sum(p.grad.abs().sum() for p in model[0].parameters())))
        buckets.clear()


class Twice(nn.Module):
    """A layer that can be used once or twice, each time under its own re-entrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: torch.Tensor, *, times: int) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.again, x, use_reentrant=True)  # type: ignore[assignment]
        return x.sum()


@contextmanager
def suppress_misuse() -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except MisuseError as error:
        said.append(str(error))


@pytest.mark.parametrize("uses", [[2, 2, 2], [1, 2], [1, 1, 2, 1, 2]], ids=["always", "later", "now and then"])
@pytest.mark.parametrize("one_bucket", [True, False])
def test_a_gradient_that_comes_in_parts_is_whole_or_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, uses: list[int], one_bucket: bool
) -> None:
    model, expected = Twice(), Twice()
    wire = Wire()
    buckets = Buckets(list(model.parameters()), wire) if one_bucket else None
    if buckets is None:
        buckets, wire = many_buckets(monkeypatch, model)
    for times in uses:
        wire.sent.clear()
        wire.flats.clear()
        expected.zero_grad()
        expected(X, times=times).backward()
        with suppress_misuse() as refusal:
            buckets.backward(model(X, times=times), last=True)
        if refusal:
            assert "overlap=False" in refusal[0]
            return
        buckets.start_rest()
        assert wire.final(), "a gradient came after its bucket had been sent"
        buckets.expose(buckets.used())
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        buckets.clear()


def test_a_backward_that_fails_half_way_leaves_the_sum_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise torch.OutOfMemoryError("no room")

    model = net()
    buckets, _ = many_buckets(monkeypatch, model)
    buckets.backward(model(X).sum(), last=False, atomic=True)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        buckets.backward(model[2](Fails.apply(model[:2](X))).sum(), last=False, atomic=True)
    buckets.check_untouched()
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 1, 1, 1), (1, 4, 1, 3)])
def test_a_channels_last_parameter_has_a_gradient_of_its_own_layout(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))
    other = nn.Parameter(torch.randn(5))
    buckets = Buckets([weight, other], Wire())
    buckets.backward((weight * 3).sum() + other.sum(), last=True)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, torch.full(shape, 3.0))
    assert torch.equal(other.grad, torch.ones(5))


def test_a_parameter_without_a_dense_layout_still_gets_its_gradient() -> None:
    weight = nn.Parameter(torch.randn(3, 5).t())
    buckets = Buckets([weight], Wire())
    buckets.backward((weight * torch.arange(15.0).view(5, 3)).sum(), last=True)
    assert torch.equal(weight.grad, torch.arange(15.0).view(5, 3))


def test_sparse_gradients_are_refused_with_advice() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    buckets = Buckets(list(embedding.parameters()), Wire())
    with pytest.raises(ValueError, match="sparse=False"):
        buckets.backward(embedding(torch.tensor([1])).sum(), last=True)


def test_detached_buckets_leave_no_hook_behind() -> None:
    model = net()
    buckets = Buckets(list(model.parameters()), Wire())
    buckets.detach()
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Counting(Buckets):
    """Counts autograd's calls."""

    called = 0

    def _came(self, number: int, parameter: nn.Parameter) -> None:
        self.called += 1
        super()._came(number, parameter)


@pytest.mark.parametrize("wire", [None, Wire()], ids=["alone", "fleet"])
def test_autograd_calls_for_every_parameter_only_where_sums_start(wire: Wire | None) -> None:
    model = net()
    buckets, each = Counting(list(model.parameters()), wire), len(list(model.parameters()))
    calls = []
    for _ in range(3):
        for last in (False, False, True):
            before = buckets.called
            buckets.backward(model(X).sum(), last=last)
            calls.append(buckets.called - before)
        buckets.start_rest()
        buckets.clear()
    assert calls[:3] == [each] * 3, "the first step shows how gradients come"
    assert calls[3:] == [1, 1, 1 if wire is None else each] * 2


@pytest.mark.parametrize("wire", [None, Wire()], ids=["alone", "fleet"])
@pytest.mark.parametrize(
    "strange",
    [
        lambda model: model(X).sum().backward(),
        lambda model: model[2](torch.ones(1, 3).double()).sum().backward(),
        lambda model: model[2].bias.grad.mul_(2.0),
        lambda model: model.zero_grad(),
        lambda model: setattr(model[2].weight, "grad", torch.zeros(1, 3).double()),
    ],
    ids=["whole model", "last layer", "in place", "cleared", "assigned"],
)
def test_a_gradient_that_is_not_the_steps_is_noticed_though_one_parameter_alone_calls(
    wire: Wire | None, strange: Any
) -> None:
    model = net()
    buckets = Buckets(list(model.parameters()), wire)
    for _ in range(2):
        for last in (False, False, True):
            buckets.backward(model(X).sum(), last=last)
        buckets.start_rest()
        buckets.clear()
    buckets.backward(model(X).sum(), last=False)

    def go_on() -> None:
        strange(model)
        buckets.backward(model(X).sum(), last=False)

    with pytest.raises(MisuseError):
        go_on()


def test_a_backward_of_the_users_own_before_a_step_is_refused_though_one_parameter_alone_calls() -> None:
    model = net()
    buckets = Buckets(list(model.parameters()))
    for _ in range(2):
        buckets.backward(model(X).sum(), last=True)
        buckets.start_rest()
        buckets.clear()
    with pytest.raises(MisuseError, match="plain"):
        model(X).sum().backward()
    buckets.backward(model(X).sum(), last=True)  # what it left is gone
    buckets.clear()
    model[2](torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(MisuseError, match="before the step's first"):
        buckets.backward(model(X).sum(), last=True)
    model.zero_grad()
    buckets.backward(model(X).sum(), last=True)


@pytest.mark.parametrize("copies_late", [False, True])
def test_a_parameter_that_is_reached_by_a_later_micro_batch_alone_counts(copies_late: bool) -> None:
    model, expected, wire = net(), net(), Wire()
    buckets = Buckets(list(model.parameters()), wire, copies_late=copies_late)
    for uses in ((True, True, True), (False, True, False), (False, False, True), (True, False, False)):
        wire.sent.clear()
        wire.flats.clear()
        expected.zero_grad()
        for number, whole in enumerate(uses):
            buckets.backward((model(X) if whole else model[:2](X)).sum(), last=number == 2)
            (expected(X) if whole else expected[:2](X)).sum().backward()
        buckets.check_untouched()
        buckets.start_rest()
        assert wire.final()
        buckets.expose(buckets.used())
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        buckets.clear()


def test_touching_a_bucket_changes_nothing_in_it() -> None:
    model = nn.Linear(4, 2, dtype=torch.float64)
    buckets = Buckets(list(model.parameters()), Wire(), copies_late=True)
    for bucket in buckets.buckets:
        bucket.touch()
        assert all(not flat.any() for flat in bucket._flats)
        assert len(bucket._flats) == 2
