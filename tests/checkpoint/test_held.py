"""What a newcomer holds already is not sent; what differs, or has changed by whatever means, is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import held
from paceline.checkpoint.content import load_into
from paceline.checkpoint.held import ROW, SMALL, TRIES, Holding, look_at, sums_of_bits
from paceline.checkpoint.parts import LEAST, fill, large_parts, put_together, take_apart

CPU = torch.device("cpu")
SIZE = LEAST // 4
"""Elements of a large tensor of float32."""


class Adapted(nn.Module):
    """A frozen part, a buffer and a trained part; the first two differ by ``seed``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(3, SIZE, generator=random), requires_grad=False)
        self.register_buffer("table", torch.randn(SIZE, generator=random))
        self.trained = nn.Parameter(torch.randn(SIZE, generator=random))


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"models": [model.state_dict()]}


def holding_of(model: nn.Module) -> Holding:
    def lasting() -> Any:
        named = [*model.named_parameters(), *model.named_buffers()]
        return [("models", 0, name) for name, tensor in named if not tensor.requires_grad]

    return Holding(lambda: state_of(model), lasting)


def looked(model: nn.Module) -> Holding:
    """What a giver holds once its thread has ended."""
    holding = holding_of(model)
    look_again(holding)
    return holding


def look_again(holding: Holding) -> None:
    holding.look_beside()
    if holding._thread is not None:
        holding._thread.join(10)


def handed(giver: nn.Module, giving: Holding, newcomer: nn.Module) -> list[int]:
    """Hand the giver's state to a newcomer, which then must hold the same; returns the sizes of what travelled."""
    own = holding_of(newcomer).look()
    parts = take_apart(state_of(giver), held=lambda part: giving.leave_out(part, own.keys()))
    load_into(newcomer, put_together([part.clone() for part in parts], device=CPU, own=own)["models"][0])
    for ours, theirs in zip(newcomer.state_dict().values(), giver.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    return [part.numel() for part in parts[1:]]


def test_what_the_newcomer_holds_stays_where_it_is() -> None:
    giver, newcomer = Adapted(), Adapted()
    with torch.no_grad():
        giver.trained.add_(1.0)
    before = newcomer.frozen.data_ptr()
    assert handed(giver, looked(giver), newcomer) == [0, LEAST, 0], "in the order of the state: the trained part alone"
    assert newcomer.frozen.data_ptr() == before


def test_what_differs_travels() -> None:
    giver, newcomer = Adapted(), Adapted()
    with torch.no_grad():
        newcomer.frozen[2, 7] += 1.0
    assert handed(giver, looked(giver), newcomer) == [3 * LEAST, LEAST, 0]
    assert handed(giver, looked(giver), Adapted(seed=5)) == [3 * LEAST, LEAST, LEAST]


def in_place(model: Adapted) -> None:
    with torch.no_grad():
        model.frozen[1, 5] = 3.0


def by_data(model: Adapted) -> None:
    model.frozen.data.mul_(1.001)


def by_roll(model: Adapted) -> None:
    model.frozen.data.copy_(model.frozen.data.roll(1))


def by_rows(model: Adapted) -> None:
    model.frozen.data.copy_(model.frozen.data.flip(0))


def by_numpy(model: Adapted) -> None:
    model.frozen.detach().numpy()[2, SIZE - 1] = 3.0


def by_signs(model: Adapted) -> None:
    model.frozen.data[:, 1::2].neg_()


def by_another(model: Adapted) -> None:
    model.frozen.data = model.frozen.data + 1.0


@pytest.mark.parametrize("change", [in_place, by_data, by_roll, by_rows, by_numpy, by_signs, by_another])
def test_what_changed_after_it_was_digested_travels_and_is_digested_again(change: Callable[[Adapted], None]) -> None:
    giver = Adapted()
    giving = looked(giver)
    change(giver)
    assert handed(giver, giving, Adapted()) == [3 * LEAST, LEAST, 0]
    again = Adapted()
    change(again)
    look_again(giving)
    assert handed(giver, giving, again) == [0, LEAST, 0]


def test_a_part_that_steps_change_is_digested_a_few_times_and_then_never_again() -> None:
    giver = Adapted()
    giving = looked(giver)
    for _ in range(TRIES):
        newcomer = Adapted()
        newcomer.load_state_dict(giver.state_dict())
        giver.table.add_(1.0)
        assert handed(giver, giving, newcomer) == [0, LEAST, LEAST]
        look_again(giving)
    assert len(giving._seen) == 1, "the frozen parameter"
    newcomer.load_state_dict(giver.state_dict())
    assert handed(giver, giving, newcomer) == [0, LEAST, LEAST]


def test_a_part_that_has_no_digest_yet_travels_and_so_does_everything_for_one_that_holds_nothing() -> None:
    giver = Adapted()
    assert handed(giver, holding_of(giver), Adapted()) == [3 * LEAST, LEAST, LEAST]
    giving = looked(giver)
    parts = take_apart(state_of(giver), held=lambda part: giving.leave_out(part, ()))
    assert [part.numel() for part in parts[1:]] == [3 * LEAST, LEAST, LEAST]
    assert handed(giver, giving, Adapted()) == [0, LEAST, 0], "it is still known"


def test_memory_that_a_trained_parameter_shares_is_not_looked_at() -> None:
    model, whole = Adapted(), torch.randn(2 * SIZE)
    model.frozen.data, model.trained.data = whole[:SIZE], whole[SIZE:]
    assert [part.numel() for part in holding_of(model).look().values()] == [LEAST], "the buffer"


def test_equal_bytes_in_another_place_or_of_another_shape_are_not_the_same() -> None:
    both, swapped = torch.randn(SIZE), torch.randn(SIZE)
    contents = [
        {"a": both, "b": swapped},
        {"a": swapped, "b": both},
        {"a": both.view(2, -1), "b": swapped.view(torch.int32)},
        {"a": both, "b": swapped, "c": [swapped[5:]]},
    ]
    digests = [{seen.digest for part in large_parts(one) if (seen := look_at(part))} for one in contents]
    assert [len(one) for one in digests] == [2, 2, 2, 2]
    assert len(set.union(*digests)) == 7, "a in the first and in the last"


def test_a_state_that_waits_keeps_what_was_held_when_it_came() -> None:
    giver, newcomer = Adapted(), Adapted()
    giving, own = looked(giver), holding_of(newcomer).look()
    parts = take_apart(state_of(giver), held=lambda part: giving.leave_out(part, own.keys()))
    fill(parts, own)
    newcomer.frozen.data.zero_()
    load_into(newcomer, put_together(parts, device=CPU)["models"][0])
    assert torch.equal(newcomer.frozen, giver.frozen)


def test_a_part_that_nobody_holds_is_refused() -> None:
    parts = take_apart(state_of(Adapted()), held=lambda part: "0" * 32)
    with pytest.raises(ValueError, match="do not fit together"):
        put_together(parts, device=CPU)


def test_objects_whose_state_cannot_be_read_leave_nothing_out() -> None:
    def fails() -> Any:
        raise RuntimeError("not now")

    assert Holding(fails, lambda: [("models",)]).look() == {}


def test_the_thread_ends_when_the_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    giver = Adapted()
    holding = holding_of(giver)
    holding._ended = True
    look_again(holding)
    assert holding._seen == {}
    holding.close()


# -- sums of bits ------------------------------------------------------------------------------------------------------


def seen(memory: torch.Tensor) -> held.PartDigest:
    found = look_at(large_parts({"a": memory})[0])
    assert found is not None
    return found


@pytest.mark.parametrize("size", [LEAST, LEAST + 1, 8 * ROW * 9, SMALL, SMALL + 12345, 3 * SMALL - 7])
def test_sums_do_not_depend_on_how_much_is_read_at_a_time(size: int) -> None:
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert seen(memory).sums == sums_of_bits(memory)
    memory[size - 1] ^= 1
    assert seen(memory).sums == sums_of_bits(memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_and_sums_are_the_same_on_a_gpu_and_what_is_held_there_stays() -> None:
    memory = torch.randint(0, 256, (SMALL + 12345,), dtype=torch.uint8)
    assert seen(memory.cuda()) == seen(memory)
    assert sums_of_bits(memory.cuda()) == sums_of_bits(memory)
    giver, newcomer = Adapted().cuda(), Adapted().cuda()
    giving, own = looked(giver), holding_of(newcomer).look()
    parts = take_apart(state_of(giver), held=lambda part: giving.leave_out(part, own.keys()))
    assert [part.numel() for part in parts[1:]] == [0, LEAST, 0]
    load_into(newcomer, put_together(parts, device=torch.device("cuda"), own=own)["models"][0])
    assert torch.equal(newcomer.frozen, giver.frozen)


@given(st.lists(st.integers(0, LEAST - 1), min_size=1, max_size=6, unique=True), st.integers(1, 255))
def test_any_bits_that_flip_show_in_the_sums(at: list[int], bits: int) -> None:
    memory = torch.zeros(LEAST, dtype=torch.uint8)
    before = sums_of_bits(memory)
    memory[at] ^= bits
    assert sums_of_bits(memory) != before


@pytest.mark.parametrize("period", [1, 2, 3, 4, 8, 2 * ROW])
def test_patterns_that_plain_sums_do_not_see_show_in_these(period: int) -> None:
    signs = torch.ones(2 * LEAST // 4).view(-1, 2 * ROW)
    signs[:, ::2] = -1.0
    signs[1::2] *= -1.0
    before = sums_of_bits(signs.view(torch.uint8).reshape(-1))
    for changed in (-signs, signs.reshape(-1).roll(period).view_as(signs)):
        same = torch.equal(changed, signs)
        assert (sums_of_bits(changed.reshape(-1).view(torch.uint8)) == before) is same
