"""The roster: one small arbiter of who is in the fleet.

`Steward` serves (in the launcher, or by ``paceline host``), `Member` is a worker's side of it, and a `Generation` is
what they agree on. The rules are pure and stand in `roll` and `decide`.
"""

from paceline.roster.client import Member
from paceline.roster.generation import Generation, Gone, RunOver
from paceline.roster.membership_rules import LEFT
from paceline.roster.server import Steward

__all__ = ["LEFT", "Generation", "Gone", "Member", "RunOver", "Steward"]
