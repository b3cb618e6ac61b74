"""Whether every sample counted exactly once, in words."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.analysis.audit import EpochAudit


def audit_verdict(epochs: Sequence[EpochAudit]) -> str:
    """The audit's outcome for the closing verdict; empty when there is nothing to audit."""
    told = [epoch for epoch in epochs if epoch.recorded]
    lost, doubled = sum(epoch.missing for epoch in told), sum(epoch.twice for epoch in told)
    if lost or doubled:
        return f"Audit: NOT exact: {_samples(lost)} lost, and {_samples(doubled)} counted more than once."
    whole = sum(epoch.whole for epoch in told)
    if whole and len(told) == len(epochs):
        return f"Audit: every sample counted once, in {whole:,} epoch{'' if whole == 1 else 's'}{_rest(told)}."
    if any(epoch.resumed for epoch in told):
        return "Audit: no epoch is in this run from its beginning to its end; no sample counted twice."
    return "Audit: no epoch was finished; no sample counted twice so far." if told else ""


def _rest(epochs: Sequence[EpochAudit]) -> str:
    """What is known of those that are not whole."""
    rest = [epoch for epoch in epochs if not epoch.whole]
    names = ["that was resumed" if epoch.resumed else "that was not finished" for epoch in rest]
    return f"; of the epoch {' and of the one '.join(names)}, none twice" if names else ""


def _samples(count: int) -> str:
    return "1 sample was" if count == 1 else f"{count:,} samples were"


def audit_text(epochs: Sequence[EpochAudit]) -> str:
    """The audit's outcome for the report, in a sentence."""
    wrong = [epoch for epoch in epochs if epoch.recorded and not epoch.sound]
    told, again = [epoch for epoch in epochs if epoch.recorded], sum(epoch.undone for epoch in epochs)
    dealt = f" {again:,} samples were dealt again after their step had closed without them." if again else ""
    if wrong:
        return f"NOT exact in {len(wrong)} of {len(epochs)} epochs: samples counted twice, or missing.{dealt}"
    if not told:
        return "The record holds no positions (a stream, or an older log): nothing to audit."
    whole = sum(epoch.whole for epoch in told)
    part = "" if whole == len(told) else " Of an epoch that is not whole in this log: none twice so far."
    return f"Every sample counted exactly once in {whole} of {whole} whole epochs.{part}{dealt}"


def epoch_text(epoch: EpochAudit) -> str:
    """The same of one epoch, for a cell of a table."""
    if not epoch.recorded:
        return "positions not recorded"
    if not epoch.sound:
        return "NOT exact"
    return "each exactly once" if epoch.whole else "none twice (part of an epoch)"
