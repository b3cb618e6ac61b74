"""The pages of a run: the report, in one file that opens from disk (docs/monitoring.md), and the live page."""

from paceline.page.html import report_page, write_report

__all__ = ["report_page", "write_report"]
