"""Tables of a TOML file that know the line each value stands in, for errors that say where."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.simulate.network_table import UNITS

HEAD = re.compile(r"\s*\[\[?\s*([A-Za-z0-9_.\"-]+)\s*\]\]?")
KEY = re.compile(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d*)?)\s*([kmgb]?)\s*", re.ASCII)

Place = tuple[str, int, str]
"""A table's name, its number among those of that name, and a key in it; an empty key is the table's head."""


def places(text: str) -> dict[Place, int]:
    """The line of every table's head and of every key, as far as they stand on lines of their own.

    >>> places('[model]\\nbatch = 8\\n[[machines]]\\n[[machines]]\\nspeed = 1')["machines", 1, "speed"]
    5
    """
    found: dict[Place, int] = {}
    seen: Counter[str] = Counter()
    table, number = "", 0
    for line, words in enumerate(text.splitlines(), start=1):
        if head := HEAD.match(words):
            table = head[1].strip('"')
            number, seen[table] = seen[table], seen[table] + 1
            found[table, number, ""] = line
        elif key := KEY.match(words):
            found.setdefault((table, number, key[1]), line)
    return found


class FileTable:
    """One table: its values are asked for by name, and what was never asked for is refused."""

    def __init__(self, tables: Tables, name: str, number: int, values: Mapping[str, Any]) -> None:
        self._tables, self._name, self._number, self._values = tables, name, number, values
        self._asked: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def wrong(self, key: str, text: str) -> ValueError:
        """The error for a value: ``fleet.toml, line 12: speed is 0, ...``."""
        return self._tables.wrong(f"{key} {text}" if key else text, self._line(key))

    def _line(self, key: str) -> int | None:
        lines, name, number = self._tables.lines, self._name, self._number
        return lines.get((name, number, key)) or lines.get((name, number, ""))

    def get(self, key: str) -> Any:
        self._asked.append(key)
        return self._values.get(key)

    def number(self, key: str, default: float, *, above: float | None = None, least: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, f"is {value!r}, and should be a number")
        if above is not None and not value > above:
            raise self.wrong(key, f"is {value:g}, and must be above {above:g}")
        if least is not None and not value >= least:
            raise self.wrong(key, f"is {value:g}, and must be at least {least:g}")
        return float(value)

    def whole(self, key: str, default: int | None) -> int:
        """A whole number from 1; also as text, such as ``"50M"``."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.wrong("", f"{self.called} does not say {key}")
            return default
        many = value if isinstance(value, int) and not isinstance(value, bool) else count(value)
        if many < 1:
            raise self.wrong(key, f'is {value!r}, and should be a whole number from 1, such as 512 or "50M"')
        return many

    def text(self, key: str, default: str | None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong("", f"{self.called} does not say {key}")
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"is {value!r}, and should be a text")
        return value.strip()

    @property
    def called(self) -> str:
        """The table as the file writes it."""
        return f"[{self._name}]" if self._name in ("model", "job") else f"[[{self._name}]]"

    def done(self) -> None:
        """Refuse what was never asked for."""
        for key in self._values:
            if key not in self._asked:
                raise self.wrong(key, f"is not known in {self.called}{_meant(key, self._asked)}")


class Tables:
    """A file's tables."""

    def __init__(self, file: str, text: str, values: Mapping[str, Any]) -> None:
        self.file, self.lines, self._values = file, places(text), values

    def wrong(self, text: str, line: int | None = None) -> ValueError:
        return ValueError(f"{self.file}{f', line {line}' if line else ''}: {text}")

    def only(self, *names: str) -> None:
        for name in self._values:
            if name not in names:
                line = self.lines.get((name, 0, "")) or self.lines.get(("", 0, name))
                raise self.wrong(f"{name} is not known{_meant(name, names)}", line)

    def one(self, name: str, *, needed: bool = True) -> FileTable:
        values = self._values.get(name)
        if values is None and needed:
            raise self.wrong(f"there is no [{name}]: it has the model's size, the batch and a sample's time")
        if values is not None and not isinstance(values, dict):
            raise self.wrong(f"{name} is a table: write [{name}]", self.lines.get((name, 0, "")))
        return FileTable(self, name, 0, values or {})

    def many(self, name: str) -> list[FileTable]:
        values = self._values.get(name, [])
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise self.wrong(f"{name} are tables, one for each: write [[{name}]]", self.lines.get((name, 0, "")))
        return [FileTable(self, name, number, one) for number, one in enumerate(values)]


def _meant(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(dict.fromkeys(known))}"


def count(value: object) -> int:
    found = COUNT.fullmatch(value.lower()) if isinstance(value, str) else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0
