"""Every wait has an end or an owner: blocking waits are found in the source, and those without a bound are in a table.

The library takes threads, locks, waits and clocks from `paceline.concurrency`, so that a test can own all of them. A
wait that has neither a timeout nor a watch is allowed only when tests/waits.md says what ends it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import concurrency
from source_trees import tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGE = ROOT / "tests" / "waits.md"
HEADING, STORE_HEADING = "## Every wait has an end", "## Requests to a store"
THROUGH = "concurrency.py"
"""The one file that may use the modules below."""
MODULES = ("threading", "queue", "_thread", "sched")
CLOCKS = ("sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")
WITHOUT_ARGUMENTS = ("wait", "join", "acquire", "select", "get", "accept", "recv", "recv_bytes", "communicate")
"""Calls that wait for ever when they are given nothing."""
WITH_TIMEOUT = ("wait", "join", "acquire", "select", "get", "communicate")
"""Calls whose argument, where there is one, may be a timeout."""

Wait = tuple[str, str]
"""The file of an unbounded wait, and the function."""


# -- what is not to be used directly -----------------------------------------------------------------------------------


def direct_uses(module: ast.Module) -> list[str]:
    """Return what a module uses of threads, queues and clocks without going through `paceline.concurrency`."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
            found += [f"time as {alias.asname}" for alias in node.names if alias.name == "time" and alias.asname]
        elif isinstance(node, ast.ImportFrom):
            found += _bound_early(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            found += [f"time.{node.attr}"] if node.attr in CLOCKS else []
    return found


def _bound_early(node: ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    if node.module in MODULES:
        return [f"from {node.module}"]
    forbidden = {"time": CLOCKS, "paceline.concurrency": concurrency.REPLACED}.get(node.module or "", ())
    return [f"from {node.module} import {name}" for name in names if name in forbidden or (forbidden and name == "*")]


def test_threads_queues_and_clocks_come_from_one_module() -> None:
    used = {
        str(file.relative_to(SOURCE)): uses
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE) != Path(THROUGH) and (uses := direct_uses(tree(file)))
    }
    assert not used, "write concurrency.Condition(), concurrency.sleep(...), concurrency.monotonic()"


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import threading", ["threading"]),
        ("from queue import SimpleQueue", ["from queue"]),
        ("import time\ntime.sleep(1)", ["time.sleep"]),
        ("import time\nstarted = time.monotonic", ["time.monotonic"]),
        ("import time as clock", ["time as clock"]),
        ("from time import perf_counter, strftime", ["from time import perf_counter"]),
        ("from paceline.concurrency import Lock, Empty", ["from paceline.concurrency import Lock"]),
        ("import time\ntime.strftime('%H'), time.localtime(), time.thread_time(), time.get_clock_info('time')", []),
        ("from paceline import concurrency\nconcurrency.sleep(1)", []),
        ("SCRIPT = 'import threading, time; time.sleep(1)'", []),
    ],
)
def test_a_direct_use_is_found(source: str, uses: list[str]) -> None:
    assert direct_uses(ast.parse(source)) == uses


def lost_names(source: str) -> list[str]:
    """Return what a script inside a string uses of `concurrency` without an import: it runs in a process of its own."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    imports = any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in module.body)
    return [node.id for node in ast.walk(module) if imports and isinstance(node, ast.Name) and node.id == "concurrency"]


def test_scripts_inside_strings_use_the_clocks_that_they_import() -> None:
    texts = [
        (str(file.relative_to(SOURCE)), node.value)
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value
    ]
    assert not [file for file, text in texts if lost_names(text)]
    assert lost_names("import time\nconcurrency.sleep(1)") == ["concurrency"]
    assert not lost_names("import time\ntime.sleep(1)")


# -- waits without a bound ---------------------------------------------------------------------------------------------


def unbounded(module: ast.Module) -> Iterator[str]:
    """Yield the function, with its class, of every blocking wait that has no bound of its own."""
    for owner, function in _functions(module):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (_waits(node, _may_be_none(function)) or _is_handed_on(node)):
                yield f"{owner}.{function.name}" if owner else function.name


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions of the module and methods of its classes; what they define inside belongs to them."""
    for node in module.body:
        inside = [(node.name, child) for child in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for owner, child in inside:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield owner, child


def _waits(call: ast.Call, may_be_none: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name, words = call.func.attr, {word.arg: word.value for word in call.keywords}
    if name == "wait_for":
        if "watch" in words:
            return False
        timeout = words.get("timeout") or (call.args[1] if len(call.args) > 1 else None)
        return timeout is None or _endless(timeout, may_be_none)
    if name in WITHOUT_ARGUMENTS and not call.args and not words:
        return True
    timeout = words.get("timeout") or (call.args[0] if len(call.args) == 1 else None)
    return name in WITH_TIMEOUT and timeout is not None and _endless(timeout, may_be_none)


def _endless(timeout: ast.expr, may_be_none: set[str]) -> bool:
    """Return whether a timeout may be None, or is the engine's of a week."""
    return any(
        (isinstance(part, ast.Constant) and part.value is None and not isinstance(timeout, ast.Compare))
        or (isinstance(part, ast.Name) and (part.id in may_be_none or part.id == "ENGINE_TIMEOUT"))
        for part in _values(timeout)
    )


def _values(timeout: ast.expr) -> list[ast.expr]:
    """Return what an expression may give: both branches of a conditional one."""
    return [*_values(timeout.body), *_values(timeout.orelse)] if isinstance(timeout, ast.IfExp) else [timeout]


def _may_be_none(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the parameters whose annotation allows None."""
    known = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {one.arg for one in known if one.annotation is not None and "None" in ast.unparse(one.annotation)}


def _is_handed_on(call: ast.Call) -> bool:
    """Return whether a wait is an argument, for another function to call without a bound."""
    handed = [one.attr for one in call.args if isinstance(one, ast.Attribute)]
    calls = call.func.id if isinstance(call.func, ast.Name) else ""
    return "recv_bytes" in handed or (calls == "iter" and "get" in handed)


def table(page: str, heading: str = HEADING) -> list[list[str]]:
    """Return the rows of a section's table: file, function, what is waited for, what ends it."""
    section = page.partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def named(cell: str) -> str:
    return cell.strip("`")


def found_waits() -> set[Wait]:
    return {
        (str(file.relative_to(SOURCE)), function) for file in SOURCE.rglob("*.py") for function in unbounded(tree(file))
    }


def test_every_wait_is_bounded_or_in_the_table_with_what_ends_it() -> None:
    found, listed = found_waits(), {(named(row[0]), named(row[1])) for row in table(PAGE.read_text())}
    new, old = sorted(found - listed), sorted(listed - found)
    assert not new, f"give these waits a timeout or a watch, or add them to '{HEADING}' of {PAGE.name}: {new}"
    assert not old, f"remove from '{HEADING}' of {PAGE.name}, for nothing waits there without a bound: {old}"


def test_every_row_of_the_table_says_what_is_waited_for_and_what_ends_it_and_stands_once() -> None:
    rows = table(PAGE.read_text())
    assert len(rows) > 30
    assert all(len(row) == 4 and all(row) for row in rows), [row for row in rows if len(row) != 4 or not all(row)]
    keys = [tuple(row[:2]) for row in rows]
    assert keys == sorted(set(keys)), "by file and function"


# -- requests to a store -----------------------------------------------------------------------------------------------

STORES = ("store", "root", "launcher", "signals", "board")
"""Words in the names of what a store is held by."""
REQUESTS = ("get", "set", "check", "add", "compare_set", "delete_key", "list_keys", "wait")


def asks_store(module: ast.Module) -> bool:
    """Return whether a module makes a request of a store, or a connection to one."""
    return any(
        isinstance(node, ast.Attribute)
        and (node.attr == "TCPStore" or (node.attr in REQUESTS and _holds_store(node.value)))
        for node in ast.walk(module)
    )


def _holds_store(expression: ast.expr) -> bool:
    inner = expression.func if isinstance(expression, ast.Call) else expression
    name = inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""
    return any(name.strip("_") == word or name.endswith(f"_{word}") for word in STORES)


def test_every_file_that_asks_a_store_is_in_the_table_with_what_ends_its_requests() -> None:
    found = sorted(str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if asks_store(tree(file)))
    rows = table(PAGE.read_text(), STORE_HEADING)
    assert [named(row[0]) for row in rows] == found
    assert all(len(row) == 3 and all(row) for row in rows), rows


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("self._store.get(key)", True),
        ("group.store.check(keys)", True),
        ("partial(self._store().compare_set, key)", True),
        ("dist.TCPStore(host, port)", True),
        ("self.group.board.check([name])", True),
        ("settings.get(name)", False),
        ("self._restored.get(name)", False),
        ("self.store = store", False),
    ],
)
def test_a_request_to_a_store_is_found(source: str, asks: bool) -> None:
    assert asks_store(ast.parse(source)) is asks


# -- which waits are bounded -------------------------------------------------------------------------------------------

BOUNDED = [
    "thread.join(5.0)",
    "event.wait(timeout=1.0)",
    "condition.wait_for(lambda: True, timeout=left)",
    "condition.wait_for(lambda: True, left)",
    "group.wait_for(keys, watch=watch)",
    "work.wait(self._look)",
    "work.wait(CHECK)",
    "', '.join(names)",
    "settings.get(name)",
    "selector.select(0.0 if ended is None else CHECK_S)",
    "queue.get_nowait()",
    "process.communicate(timeout=left)",
    "max(counts, key=counts.get)",
    "thread.join(left)",
]
UNBOUNDED = [
    "thread.join()",
    "event.wait()",
    "lock.acquire()",
    "selector.select()",
    "queue.get()",
    "listener.accept()",
    "process.communicate()",
    "condition.wait_for(lambda: True)",
    "condition.wait_for(lambda: True, timeout)",
    "condition.wait_for(lambda: True, timeout=None)",
    "work.wait(ENGINE_TIMEOUT)",
    "thread.join(timeout)",
    "thread.join(timeout=timeout)",
    "selector.select(None if left == inf else left)",
    "iter(queue.get, None)",
    "guarded(link.recv_bytes)",
    "later(lambda: event.wait())",
]


@pytest.mark.parametrize("wait", BOUNDED)
def test_a_wait_with_a_bound_or_a_watch_is_allowed(wait: str) -> None:
    assert list(unbounded(_in_function(wait))) == []


@pytest.mark.parametrize("wait", UNBOUNDED)
def test_a_wait_without_a_bound_is_found_with_its_function(wait: str) -> None:
    assert set(unbounded(_in_function(wait))) == {"outer"}
    method = ast.parse(f"class Proxy:\n    def join(self, timeout: float | None = None):\n        {wait}")
    assert set(unbounded(method)) == {"Proxy.join"}


def _in_function(wait: str) -> ast.Module:
    return ast.parse(f"def outer(left: float, timeout: float | None = None):\n    def inner():\n        {wait}")


def test_the_table_is_read_from_its_section_alone() -> None:
    before, after = "| a | b |\n|---|---|\n| `x` | y |\n\n", "\n## Next\n| c | d |\n"
    page = f"{before}{HEADING}\n\nText.\n\n| file | function |\n|---|---|\n| `f.py` | `g` |\n{after}"
    assert table(page) == [["`f.py`", "`g`"]]
    assert re.search(rf"^{HEADING}$", PAGE.read_text(), re.MULTILINE)
