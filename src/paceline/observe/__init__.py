"""The event log of a run, the live view while it trains, and the closing verdict. See docs/monitoring.md."""

from paceline.observe.log.reader import RunLog, follow, read_log
from paceline.observe.log.run_folder import latest, new_run_dir
from paceline.observe.log.writer import EventLog
from paceline.observe.views import View, make_view
from paceline.observe.words.verdict import Verdict, verdict

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
