"""What can go wrong, by name.

Bad input raises a plain ``ValueError``. A wrong use of a step raises `MisuseError` (a ``RuntimeError``), and
anything that ends the fleet raises `FleetError` with one sentence that names the worker. None of them needs a
stack trace to be understood.
"""

from __future__ import annotations

import re
import signal

FLEET_FAILED = 75
"""Exit code of a worker that was ended by the fleet's failure and not by its own."""


def describe_exit(code: int) -> str:
    """How a process ended, in words; ``code`` as `subprocess` says it: a negative one is a signal's number.

    >>> describe_exit(-9)
    'was killed by signal 9 (SIGKILL)'
    >>> describe_exit(3)
    'ended with exit code 3'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


class PacelineError(RuntimeError):
    """Base of all errors that are Paceline's own."""


class MisuseError(PacelineError):
    """The user's loop did something that would have been averaged in silently; the message says what to write."""


class LoaderDied(PacelineError):
    """A loader process of this worker's DataLoader died."""

    def __init__(self, pid: int | str, how: str) -> None:
        super().__init__(
            f"a loader process (pid {pid}) {how}: most often memory ran out (fewer num_workers, a smaller "
            "prefetch_factor or micro_batch) or shared memory (/dev/shm); num_workers=0 shows an error of the dataset's"
        )

    @classmethod
    def told_by(cls, error: BaseException) -> LoaderDied | None:
        """What torch says when a loader process dies; None for any other error. Torch raises it from a handler of
        SIGCHLD, wherever the main thread happens to be: in the middle of a round, for instance.

        >>> str(LoaderDied.told_by(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")))[:64]
        'a loader process (pid 7) was killed by signal 9 (SIGKILL): most '
        """
        if isinstance(error, cls):
            return error
        found = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", str(error), re.DOTALL)
        if found is None:
            return None
        pid, how = found.groups()
        if code := re.match(r"exited unexpectedly with exit code (\d+)", how):
            return cls(pid, describe_exit(int(code[1])))
        names = {signal.strsignal(number): number for number in signal.Signals}
        if (killed := re.match(r"is killed by signal: (.+?)\.", how)) and killed[1] in names:
            return cls(pid, describe_exit(-names[killed[1]]))
        return cls(pid, "died")


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


class DroppedInCall(FleetError):
    """The same in a call of all workers, whose result this worker's script needs; ``why``: without advice."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; start it again, and it enters anew")
        self.why = why
