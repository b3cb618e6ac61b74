"""What a run tells: the event log, the live view while it trains, and the closing verdict. See docs/observe.md."""

from paceline.observe.folders import latest, new_run_dir
from paceline.observe.log import EventLog
from paceline.observe.reading import RunLog, follow, read_log
from paceline.observe.verdict import Verdict, verdict
from paceline.observe.view import View, make_view

__all__ = [
    "EventLog",
    "RunLog",
    "Verdict",
    "View",
    "follow",
    "latest",
    "make_view",
    "new_run_dir",
    "read_log",
    "verdict",
]
