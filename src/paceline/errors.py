"""The library's errors.

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
    """Return how a process ended, in words; ``code`` is as in `subprocess`: minus a signal's number, or an exit code.

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
    """Misuse in the user's loop that would have corrupted the average silently; the message shows what to write."""


class LoaderDied(PacelineError):
    """The death of a loader process of this worker's DataLoader."""

    def __init__(self, pid: int | str, how: str) -> None:
        super().__init__(
            f"a loader process (pid {pid}) {how}: most often memory ran out (fewer num_workers, a smaller "
            "prefetch_factor or micro_batch) or shared memory (/dev/shm); num_workers=0 shows an error of the dataset's"
        )

    @classmethod
    def told_by(cls, error: BaseException) -> LoaderDied | None:
        """Return the error for a message with which torch reports a dead loader process; None for any other error.

        Torch raises it from a handler of SIGCHLD, wherever the main thread happens to be: in the middle of a round, for
        instance.

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
    """A failure that ends the fleet: a worker died, went silent, or is at another point of the program."""


class WorkerLost(FleetError):
    """The loss of a worker that died or went silent; the message names it."""


class CallMismatch(FleetError):
    """A call that only some of the workers made, though all must; the message names the workers and their calls."""


class NonFiniteGradients(FleetError):
    """NaN or infinite gradients of a worker; ``nonfinite="skip"`` in `paceline.join` skips such updates instead."""


class WorkerFailed(PacelineError):
    """The failure of a worker that `paceline.launch` started; the text holds its traceback."""

    def __init__(self, text: str, *, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


SAME_CALLS = (
    "every worker must make the same calls in the same order (a value of the script's own that decides about a call "
    "belongs in fleet.state, which a worker that joins or returns takes over)"
)
"""The rule that is broken when only some workers make a call."""


class GenerationOver(PacelineError):
    """The signal that members changed during a call, which had no effect and is retried; users never see it."""

    def __init__(self, text: str, *, generation: int = 0) -> None:
        super().__init__(text)
        self.generation = generation


class Dropped(GenerationOver):
    """The signal that the fleet went on without this silent worker, which enters anew with a peer's state."""


class DroppedInCall(FleetError):
    """The error of a dropped worker in a call whose result its script needs; ``why`` is the text without advice."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; start it again, and it enters anew")
        self.why = why
