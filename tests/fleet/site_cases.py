"""Trainings of workers in several places: on computers of a switch, or on one computer with sites that are named."""

from __future__ import annotations

import os
from typing import Any

import exact_cases
import failure_cases
import switch


def train_on_computers(args: dict[str, Any]) -> dict[str, Any]:
    """`exact_cases.train` on the computer of this rank."""
    switch.enter(args["places"][int(os.environ["RANK"])])
    return exact_cases.train(args["case"])


def train_forever(args: dict[str, Any]) -> Any:
    """`failure_cases.train_forever` with a site for every two ranks."""
    os.environ["PACELINE_SITE"] = f"site {int(os.environ['RANK']) // 2}"
    return failure_cases.train_forever(args)
