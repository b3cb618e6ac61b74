"""When a pace began to set deadlines or ended it, and why: as it happens, and as the verdict tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.observe.log import sanitise
from paceline.observe.words.numbers import percent


@dataclass(frozen=True)
class Switch:
    """A ``pace`` event of the log."""

    step: int
    """After this step."""
    deadlines: bool
    saves: float
    worker: int | None

    @property
    def why(self) -> str:
        """``worker 3 kept the others waiting: a deadline saves 9 %``."""
        who = "now this worker and now that one" if self.worker is None else f"worker {self.worker}"
        return f"{who} kept the others waiting: a deadline saves {percent(self.saves)}"

    @property
    def text(self) -> str:
        """As it happens.

        >>> Switch(312, True, 0.09, 3).text
        'after step 312 rounds have a deadline, for worker 3 kept the others waiting: a deadline saves 9 %'
        >>> Switch(480, False, 0.004, None).text
        'after step 480 everybody is waited for again: a deadline no longer pays'
        """
        if self.deadlines:
            return f"after step {self.step} rounds have a deadline, for {self.why}"
        return f"after step {self.step} everybody is waited for again: a deadline no longer pays"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_switch(event: Mapping[str, Any]) -> Switch | None:
    """The change in a ``pace`` event; None for any other, or one that lacks what makes it one."""
    step, saves, worker = sanitise.count_or(event.get("step"), -1), event.get("saves"), event.get("worker")
    known = sanitise.is_number(saves) and abs(saves) <= 1  # type: ignore[arg-type]
    if event.get("event") != "pace" or step < 0 or not isinstance(event.get("deadlines"), bool) or not known:
        return None
    named = sanitise.count_or(worker, -1)
    return Switch(step, event["deadlines"], float(saves or 0.0), named if named >= 0 else None)


def switches(events: Iterable[Mapping[str, Any]]) -> tuple[Switch, ...]:
    """Those of a log, in order."""
    return tuple(switch for event in events if (switch := parse_switch(event)) is not None)


def switches_text(found: Sequence[Switch]) -> str:
    """All of it in a sentence; empty when there was none.

    >>> switches_text([Switch(312, True, 0.09, 3), Switch(480, False, 0.0, None)])
    'Rounds had a deadline from step 312 to step 480, for worker 3 kept the others waiting: a deadline saves 9 %.'
    """
    first = next((switch for switch in found if switch.deadlines), None)
    if first is None:
        return f"Everybody was waited for again after step {found[0].step}: a deadline no longer paid." if found else ""
    later = found[found.index(first) + 1 :]
    until = f" to step {later[0].step}" if len(later) == 1 else ""
    more = f" Deadlines ended and began again, {len(later)} changes in all." if len(later) > 1 else ""
    return f"Rounds had a deadline from step {first.step}{until or ' on'}, for {first.why}.{more}"
