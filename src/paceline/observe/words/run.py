"""What a run was, in a line: the ``run`` event says who was there to begin with, the records who came and went."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.observe.analysis.figures import Figures
from paceline.observe.views.plain import run_line
from paceline.observe.words.numbers import size


def run_words(run: Mapping[str, Any], figures: Figures) -> tuple[str, str]:
    """The run's name, and ``3 to 5 workers, pace adaptive, combine gradients, gloo``."""
    name = str(run.get("name") or "run")
    details = run_line(run).removeprefix(f"{name}: ")
    if figures.fewest != figures.most:
        details = re.sub(r"^\d+ workers?\b", f"{size(figures.fewest, figures.most)} workers", details)
    return name, details
