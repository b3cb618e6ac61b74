"""What the parts of one training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from lone import join, linear, numbers
from paceline.errors import Dropped, DroppedInCall


@pytest.mark.parametrize("looped", [False, True])
def test_a_worker_that_is_dropped_in_a_call_of_all_is_told_to_start_again(tmp_path: Path, looped: bool) -> None:
    """The script needs the result, which only the others have: it can neither go on nor enter at a boundary."""
    with join(tmp_path) as fleet:
        fleet.model(linear())
        if looped:
            fleet.steps(numbers(8), global_batch=4)
        with (
            pytest.raises(DroppedInCall, match=r"fleet.predict\(\): it was silent; start it again") as dropped,
            fleet._context.meet("fleet.predict()"),
        ):
            raise Dropped("it was silent", generation=3)
        assert dropped.value.why == "fleet.predict(): it was silent"
