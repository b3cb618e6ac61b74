"""Forecasts by name, and those that plug in from another room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.pace import forecast as forecasts
from paceline.pace.forecast import Smoothed, make, register
from paceline.research.cutoff import Cutoff
from source_trees import tree

LOADED = """
import sys
import paceline.pace, paceline.pace.forecast
from paceline.pace.forecast import make

def loaded():
    return sorted({"torch", "paceline.research.deep.deep_forecast"} & set(sys.modules))

print(loaded(), make("smoothed").name, loaded(), make("deep").name, loaded())
"""


@pytest.mark.slow
def test_the_room_loads_torch_only_for_a_forecast_that_plugs_in() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "[] smoothed [] deep ['paceline.research.deep.deep_forecast', 'torch']"


def test_no_file_of_the_room_imports_torch_or_another_room_not_even_late() -> None:
    room = Path(paceline.__file__).parent / "pace"
    files = sorted(room.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(tree(file)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not module.startswith("torch"), file
                assert not module.startswith("paceline") or module.startswith(("paceline.pace", "paceline.records"))


def test_a_forecast_is_registered_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slower(Smoothed):
        def __init__(self, rate: float = 0.01) -> None:
            super().__init__(rate=rate)

        @classmethod
        def from_text(cls, forecast: str) -> Slower:
            return cls(float(forecast.partition(":")[2] or 0.01))

    monkeypatch.setattr(forecasts._FORECASTS, "_entries", dict(forecasts._FORECASTS._entries))
    register("slower", Slower)
    assert isinstance(Cutoff(forecast="slower").forecast, Slower)
    assert (make("slower").rate, make("slower:0.5").rate) == (0.01, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("unknown", ["magic", "", "smoothed:3", ":deep"])
def test_an_unknown_forecast_is_refused_with_the_known_ones(unknown: str) -> None:
    known = (
        "Known: auto, general, last, smoothed, elfving, window, deep, deep:FILE (a model written by `paceline learn`)"
    )
    with pytest.raises(ValueError, match="unknown forecast") as refused:
        make(unknown)
    assert str(refused.value).endswith(known)
