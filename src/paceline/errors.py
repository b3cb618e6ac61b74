"""What can go wrong, by name.

Bad input raises a plain ``ValueError``. A wrong use of a step raises `MisuseError` (a ``RuntimeError``), and
anything that ends the fleet raises `FleetError` with one sentence that names the worker. None of them needs a
stack trace to be understood.
"""


class PacelineError(RuntimeError):
    """Base of all errors that are Paceline's own."""


class MisuseError(PacelineError):
    """The user's loop did something that would have been averaged in silently; the message says what to write."""


class FleetError(PacelineError):
    """The fleet cannot go on: a worker died, went silent, or is somewhere else in the program."""


class WorkerLost(FleetError):
    """A worker died or went silent; the message names it."""


class CallMismatch(FleetError):
    """Only some of the workers made a call that all must make; the message says who is where."""


class NonFiniteGradients(FleetError):
    """A worker's gradients were NaN or infinite; ``nonfinite="skip"`` in `paceline.join` skips such updates instead."""


class WorkerFailed(PacelineError):
    """A worker that `paceline.launch` started has failed; the text holds its traceback."""

    def __init__(self, text: str, *, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


SAME_CALLS = (
    "every worker must make the same calls in the same order (a value of the script's own that decides about a call "
    "belongs in fleet.state, which a worker that joins or returns takes over)"
)
"""The rule that a call made by some workers only has broken."""


class GenerationOver(PacelineError):
    """Members changed under a call: it did not happen, and is made again. Never the user's to see."""

    def __init__(self, text: str, *, generation: int = 0) -> None:
        super().__init__(text)
        self.generation = generation


class Dropped(GenerationOver):
    """The fleet went on without this worker, which was silent: it enters anew, with a peer's state."""
