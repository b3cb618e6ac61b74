"""Who steps with whom: the groups of an average, and the gradients that a group shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.combine import Gradients
from paceline.combine.averaging.settings import Averaging, ElasticAverage
from paceline.combine.gradients.varying import VaryingCount
from paceline.feed.dealing import Dealing
from paceline.machines.failures import Failures
from paceline.transport import Transport


class Place(NamedTuple):
    """Where a worker stands among the groups."""

    groups: tuple[tuple[int, ...], ...]
    """Who steps with whom, by rank; a worker without a group is one by itself."""
    members: tuple[int, ...]
    """The ranks of this worker's group."""
    member: int
    """Which of them it is."""


def place_of(combine: Averaging | ElasticAverage, *, rank: int, size: int) -> Place:
    asked = combine.groups if isinstance(combine, Averaging) else None
    groups = tuple((one,) for one in range(size)) if asked is None else tuple(tuple(group) for group in asked)
    members = next(group for group in groups if rank in group)
    return Place(groups, members, members.index(rank))


def check_fits(
    transport: Transport,
    dealing: Dealing,
    failures: Failures | None,
    *,
    grouped: bool,
    overlaps: bool,
    once: bool,
    varying: VaryingCount | None = None,
) -> None:
    """Raise ValueError for what averages, groups or overlapped rounds cannot bear."""
    if varying is not None and varying.rule != "none":
        raise ValueError(
            f"varying_count={varying.rule!r} compares a step's count with global_batch, and a local step counts one "
            "worker's part of it: leave varying_count out, or use combine='gradients'"
        )
    if failures is not None and transport.elastic:
        raise ValueError(
            "failures by chance (lost, frozen, restart) are emulated in a fleet of fixed size alone: where workers "
            "come and go, ask for real ones, such as --failures kill:1@20"
        )
    if dealing.length is None:
        raise ValueError(
            "averages need a dataset with a length: workers make unlike numbers of local steps, and a stream does not "
            "say what is left of it; use combine='gradients'"
        )
    if failures is not None and (grouped or overlaps or once):
        what = "groups, whose members step together" if grouped else "overlap" if overlaps else 'every="end"'
        raise ValueError(f"emulated failures cannot be had with {what}: leave one of them out")


def over_group(
    gradients: Gradients, transport: Any, members: Sequence[int], models: Sequence[torch.nn.Module]
) -> Gradients:
    """The gradients of a group: combined at every local step over a transport of its own."""
    if gradients.keep_graph:
        raise ValueError(
            "an optimiser that needs second derivatives has them of this worker's own loss only: leave groups out"
        )
    if not hasattr(transport, "subgroup"):
        raise ValueError(f"the transport {transport.name!r} cannot form groups: leave groups out")
    gradients.detach()
    combined = Gradients(transport.subgroup(members), models, overlap=gradients.overlap, shared=gradients.shared)
    combined.next_scaler, combined.whole, combined.varying = gradients.next_scaler, gradients.whole, gradients.varying
    return combined
