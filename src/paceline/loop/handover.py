"""A worker's replica and its place in the training, for a peer that takes them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.feed import Generators
from paceline.loop.context import LoopContext
from paceline.loop.orders import CAUSE


def place_of(loop: LoopContext) -> dict[str, Any]:
    """This worker's replica and its place in the training, at a step boundary."""
    return {
        **loop.snapshot(),
        "gradients": loop.gradients.state_dict(),
        "calls": loop.transport.calls,
        "next": loop.next,
        "finished": loop.finished,
        "progress": loop.progress,
        "full_shares": list(loop.full_shares),
        "trained": loop.gradients.accumulation.trained,
        "buffers": loop.gradients.accumulation.buffers.unsaved(),
        "random": Generators().state_dict(),
    }


def take_place(loop: LoopContext, state: Mapping[str, Any]) -> None:
    """Take over a peer's replica and its place in the training."""
    loop.restore(state)
    loop.gradients.accumulation.train_only(state["trained"])
    loop.gradients.load_state_dict(state["gradients"])
    loop.gradients.accumulation.buffers.take_unsaved(state["buffers"])
    loop.gradients.statistics_were_set()
    loop.transport.calls = state["calls"]
    loop.next, loop.finished, loop.progress = state["next"], state["finished"], state["progress"]
    loop.full_shares = tuple(state["full_shares"])
    numbers = Generators()
    numbers.load_state_dict(state["random"])
    numbers.restore()


def whole_state(loop: LoopContext) -> dict[str, Any]:
    """At a step boundary: what a newcomer needs to be where this worker is, whatever the combine."""
    with loop.training.changed:
        order, training = loop.dealing.order_digest(), loop.training.whole_state()
    return {**place_of(loop), "books": training, "order": order, "seed": loop.seed}


def take_whole_state(loop: LoopContext, state: Mapping[str, Any], *, ahead: Sequence[int]) -> None:
    """Take over a peer's `whole_state`. ``ahead``: samples that each worker's loader likes to hold."""
    take_place(loop, state)
    with loop.training.changed:
        loop.training.take_over(state["books"], ahead=ahead)
        if loop.dealing.order_digest() != state["order"]:
            raise ValueError(f"this worker's order({loop.dealing.epoch}) is not the fleet's. {CAUSE}")
        loop.seed = state["seed"]
