"""The bugs that hunted.py hunts, each as it was: with one put back, its case must go wrong.

Those of `harness/mutants.py`, and those that show in real processes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from mutants import MUTANTS, mutant

from paceline.errors import Dropped, DroppedInCall
from paceline.feed import Feed
from paceline.step import members
from paceline.training.collective import CollectiveCalls
from paceline.transport.elastic.connector import Connector
from paceline.transport.elastic.transport import Elastic

Patch = tuple[Any, str, Any]


def keeps_a_broken_store() -> list[Patch]:
    """The next generation's members go on over connections to the store that are broken."""
    return [(Connector, "forget_store", lambda self: None)]


def asks_loops_that_are_not_there() -> list[Patch]:
    """Whoever re-forms the group reads facts of a loop that another script has yet to make."""
    return [(members, "_ahead", lambda change: [int(facts["ahead"]) for facts in change.facts])]


def deals_to_one_outside() -> list[Patch]:
    """A worker outside the fleet is dealt a part of an evaluation, as if it were a member."""
    own_batches = CollectiveCalls._own_batches

    def dealt(self: CollectiveCalls, source: Any, size: int, noise: int, *, alone: bool) -> Any:
        return own_batches(self, source, size, noise, alone=False)

    return [(CollectiveCalls, "_own_batches", dealt)]


def dropped_at_a_boundary() -> list[Patch]:
    """A worker that is dropped where the group is re-formed does not enter anew: the error ends its script."""
    re_form = Elastic.re_form

    def unguarded(self: Elastic) -> None:
        inside = not self.outside
        try:
            re_form(self)
        except Dropped as dropped:
            if inside:
                raise ValueError(str(dropped)) from None
            raise

    return [(Elastic, "re_form", unguarded)]


def dropped_in_a_call() -> list[Patch]:
    """A worker that is dropped in a call does not ask to be started again: the error ends its script."""
    return [(DroppedInCall, "__init__", _raise_plainly)]


def _raise_plainly(self: DroppedInCall, text: str) -> None:
    raise ValueError(text)


def forgets_claims_of_the_dead() -> list[Patch]:
    """The samples that a lost worker had claimed are dealt to nobody."""
    members_changed = Feed.members_changed

    def forgetful(self: Feed, old_ranks: Sequence[int | None]) -> None:
        with mock.patch.object(self._pool, "put_back"):
            members_changed(self, old_ranks)

    return [(Feed, "members_changed", forgetful)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    **MUTANTS,
    **{
        one.__name__: one
        for one in (
            keeps_a_broken_store,
            asks_loops_that_are_not_there,
            deals_to_one_outside,
            dropped_at_a_boundary,
            dropped_in_a_call,
            forgets_claims_of_the_dead,
        )
    },
}


@contextmanager
def bug(name: str) -> Iterator[None]:
    """Put one of the `BUGS` back; none for an empty name."""
    with ExitStack() as stack:
        if name in MUTANTS:
            stack.enter_context(mutant(name))
        elif name:
            for patch in BUGS[name]():
                stack.enter_context(mock.patch.object(*patch))
        yield
