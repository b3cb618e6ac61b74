"""The library's source, parsed once for all tests that look at it."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
