"""Comparison of a few samples of a dataset between workers, before it is dealt.

A dataset that each worker makes for itself differs where its making is random and unseeded, or depends on the machine.
Samples would then count not at all or several times, and held-out ones would be trained on. What cannot be compared
(streams, samples without stable bytes, datasets that give another sample each time) is noted in the log.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.feed.fingerprints import alike, look_at
from paceline.settings import EACH, are_strangers

if TYPE_CHECKING:
    from paceline.training.context import TrainingContext

SLOW_S = 0.1
"""Seconds above which reading the samples of a dataset is not repeated."""
CAUSES = (
    "Make the same dataset on every worker. It usually differs because of random_split without "
    "generator=torch.Generator().manual_seed(0), random.shuffle(files) without random.seed(0) before it, or "
    "os.listdir and glob, whose order differs between machines, or a set, whose order differs between processes (a "
    "vocabulary in collate_fn): sort what they give"
)
OWN_NUMBERS = (
    "{} gives another sample each time the same one is read: it draws from a generator of its own, and every worker "
    "has one, so that samples share random numbers and depend on who fetches them. Draw from torch's, NumPy's or "
    "Python's global generator, which are seeded by each sample's position"
)

Looker = Callable[[Sequence[int]], dict[str, Any]]
"""Function that returns the fingerprints of samples: `paceline.feed.Source.look`."""
Seen = dict[str, Any]
"""One process's findings, as JSON: ``indices``, fingerprints ``found``, ``seconds``, and ``why`` it found none."""


class SameData:
    """Reader of samples of this worker's datasets, which refuses those that the other workers do not have."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._slow: list[Callable[[], Any]] = []
        self._noted: set[str] = set()

    def look(self, dataset: Any, length: int | None, looker: Looker) -> Seen:
        """Return fingerprints of a dataset, for `check`. Nothing is read where no worker could differ."""
        context = self._context
        indices = look_at(length) if length else []
        nobody = context.transport.solitary and context.elastic is None and context.transport.shards == 1
        if nobody or any(slow() is dataset for slow in self._slow):
            return {"indices": indices, "found": [], "seconds": 0.0, "why": None}
        seen = looker(indices)
        if seen["why"] is not None:
            self._note(f"{type(dataset).__name__} is not compared between workers: {seen['why']}")
        elif seen["found"] and seen["seconds"] > SLOW_S:
            self._remember_slow(dataset)
            self._note(
                f"{type(dataset).__name__} is compared between workers by {len(seen['found'])} samples, once: reading "
                f"them took {seen['seconds']:.2f} s"
            )
        return {"indices": indices, **seen}

    def check(self, label: str, name: str, answers: Sequence[Mapping[str, Any]], own: Seen, looker: Looker) -> None:
        """Raise ValueError on every worker when a sample differs between them. All workers call it.

        As in `must_agree`, those that another launcher has started raise it alone.

        ``answers`` is what `must_agree` returned, with the findings of every process.
        """
        everybody = [one[EACH] for one in answers]
        if not all(seen.get("stable", True) for parts in everybody for seen in parts):
            self._warn(OWN_NUMBERS.format(name))
        differing = unlike(everybody)
        if differing is None:
            return
        index, workers = differing
        transport, call = self._context.transport, f"the data of {label}, read again"

        def stable() -> bool:
            return all(transport.collect(call, self._reads_again(own, looker)))

        others = {worker for worker, _ in workers}
        strangers = 0 in others and are_strangers(transport, answers, others - {0})
        if all(transport.gather(call, stable)):
            mine = json.loads(json.dumps(own))
            if strangers and all(mine not in answers[worker][EACH] for worker in others - {0}):
                return
            raise ValueError(f"{label}: the workers' data differ: {who_differs(index, name, workers)}. {CAUSES}")
        self._note_unstable(name)

    def check_newcomer(self, name: str, theirs: Seen, own: Seen, looker: Looker) -> None:
        """Raise ValueError when this worker, which joins, has other samples than the fleet."""
        differing = unlike([[theirs], [own]])
        if differing is None:
            return
        if not self._reads_again(own, looker):
            self._note_unstable(name)
            return
        text = f"sample {differing[0]} of {name} is another here than in the fleet"
        raise ValueError(f"this worker's data are not the fleet's: {text}. {CAUSES}")

    def _reads_again(self, seen: Seen, looker: Looker) -> bool:
        """Return whether a second reading gives the same samples."""
        again = looker(seen["indices"][: len(seen["found"])])["found"]
        return all(alike(one, other) for one, other in zip(seen["found"], again))

    def _remember_slow(self, dataset: Any) -> None:
        try:
            self._slow.append(weakref.ref(dataset))
        except TypeError:  # a list has no weak reference
            self._slow.append(lambda: dataset)

    def _note_unstable(self, name: str) -> None:
        self._note(f"{name} is not compared between workers: it gives another sample each time the same is read")

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._context.inform(text)

    def _warn(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._context.warn(text)


def unlike(everybody: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the first sample that differs, and the (worker, process) pairs that differ; None when all agree.

    The first of the pairs is the one that the others are compared with.

    >>> unlike([[{"indices": [4], "found": [["a", []]]}], [{"indices": [4], "found": [["b", []]]}]])
    (4, [(0, 0), (1, 0)])
    """
    looked = [
        ((worker, process), seen["indices"], seen["found"])
        for worker, parts in enumerate(everybody)
        for process, seen in enumerate(parts)
        if seen["found"]
    ]
    for number in range(max((len(found) for _, _, found in looked), default=0)):
        deep = [(who, indices, found[number]) for who, indices, found in looked if len(found) > number]
        first, indices, wanted = deep[0]
        others = [who for who, theirs, its in deep if theirs == indices and not alike(wanted, its)]
        if others:
            return indices[number], [first, *others]
    return None


def who_differs(index: int, name: str, who: Sequence[tuple[int, int]]) -> str:
    """Describe which workers have another sample than the first.

    >>> who_differs(7, "TensorDataset", [(0, 0), (1, 0), (3, 0)])
    'sample 7 of TensorDataset is another on workers 1 and 3 than on worker 0'
    >>> who_differs(7, "TensorDataset", [(0, 0), (0, 1)])
    'sample 7 of TensorDataset is another in process 1 of worker 0 than in its process 0'
    """
    first, *others = who
    workers = sorted({worker for worker, _ in others if worker != first[0]})
    if not workers:
        return (
            f"sample {index} of {name} is another in process {others[0][1]} of worker {first[0]} than in its process "
            f"{first[1]}"
        )
    listed = " and ".join(filter(None, [", ".join(map(str, workers[:-1])), str(workers[-1])]))
    return (
        f"sample {index} of {name} is another on worker{'s' if len(workers) > 1 else ''} {listed} than on worker "
        f"{first[0]}"
    )
