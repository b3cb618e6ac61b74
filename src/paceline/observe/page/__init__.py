"""The page a run becomes: pictures and answers, in one file that opens from disk. See docs/report.md."""

from paceline.observe.page.html import report_page, write_report

__all__ = ["report_page", "write_report"]
