"""What an editor knows of a user's script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import paceline
from torch import nn

class Net(nn.Module):
    width: int = 3

with paceline.join() as fleet:
    model = fleet.model(Net())
    reveal_type(model)
    reveal_type(model.width)
"""

QUICK = """
[mypy]
[mypy-torch.*,numpy.*]
follow_imports = skip
"""
"""Torch's own types take mypy ten seconds to read, and are not asked about."""


@pytest.mark.slow
def test_the_model_that_comes_back_has_the_users_own_class(tmp_path: Path) -> None:
    script, settings = tmp_path / "script.py", tmp_path / "mypy.ini"
    script.write_text(SCRIPT)
    settings.write_text(QUICK)
    command = (sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", script)
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert 'Revealed type is "script.Net"' in said, said
    assert re.search(r'Revealed type is "(builtins\.)?int"', said), said
