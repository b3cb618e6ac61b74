"""The roster: one small server decides who is in the fleet.

`RosterServer` serves (in the launcher, or by ``paceline host``), `RosterClient` is a worker's side of it, and a
`Generation` is what they agree on. The rules are pure and stand in `membership_rules` and `decide`.
"""

from paceline.roster.client import RosterClient
from paceline.roster.membership_rules import LEFT
from paceline.roster.server import RosterServer
from paceline.roster.state import FINISHED, Generation, Gone, RunOver

__all__ = ["FINISHED", "LEFT", "Generation", "Gone", "RosterClient", "RosterServer", "RunOver"]
