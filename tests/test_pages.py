"""The README and the documentation's pages: links lead somewhere, commands exist, figures agree, and both stay short.

``make docs`` builds the site with ``--strict``; what can be seen without MkDocs is held here. Figures stand on
docs/evidence.md, each behind an anchor; other pages quote them as links to that anchor.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import paceline
from paceline.cli import app
from paceline.fleet import Fleet
from paceline.step.step import Step
from paceline.step.steps import Steps

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
HOST, SITE = URLS["Homepage"], URLS["Documentation"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TIERS = ["Get started", "How-to", "Concepts", "Reference", "Below the line"]
MOST_PAGES, MOST_WORDS, MOST_WORDS_OF_README = 22, 32_000, 700
TEN_WORDS = ("share", "round", "pace", "roster", "generation", "late", "lap", "wire", "leader", "worker")
LINES_OF_A_SCREEN = 15


# -- links -------------------------------------------------------------------------------------------------------------


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_repository() -> None:
    links = LINK.findall(README)
    assert len(links) > 5
    for link in links:
        file, anchor = file_of(link), link.partition("#")[2]
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text()), link


def file_of(link: str) -> Path:
    """The file in the repository behind an address of the project."""
    address = link.partition("#")[0]
    if address.startswith(SITE):
        return ROOT / "docs" / ((address.removeprefix(SITE).strip("/") or "index") + ".md")
    kind, _, path = address.removeprefix(f"{HOST}/").partition("/main/")
    assert address.startswith(HOST), f"{link} is no address of the project"
    assert kind in ("blob", "raw", "tree"), link
    return ROOT / path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target.read_text()), f"{page.name}: {link}"


def anchors(text: str) -> set[str]:
    """What a page's headings are called in addresses, and the anchors that it sets itself."""
    bare = without_code(text)
    heads = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', bare))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


SOURCES = [
    file
    for folder in ("src", "tests", "benchmarks", "examples", "harness", "docs")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
]


def test_every_page_that_a_source_file_or_a_message_names_exists() -> None:
    texts = [*SOURCES, ROOT / "Makefile", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "mkdocs.yml"]
    named = {(str(file.relative_to(ROOT)), name) for file in texts for name in named_pages(file)}
    assert len(named) > 20
    assert not [(file, name) for file, name in named if not (ROOT / name).exists()]


def named_pages(file: Path) -> list[str]:
    return re.findall(r"docs/[\w-]+\.md", file.read_text())


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_benchmark_test_and_example_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"\b(?:tests|benchmarks|examples|harness)/[\w/]+\.\w+", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


# -- order and size ----------------------------------------------------------------------------------------------------


def navigation() -> list[str]:
    return re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_index_and_the_site_list_every_page_in_one_order_and_in_four_tiers() -> None:
    assert sorted(navigation()) == [page.name for page in PAGES]
    index = (ROOT / "docs" / "index.md").read_text()
    rows = re.findall(r"^\| \[.*?\]\((.*?)\)", index, re.MULTILINE)
    assert ["index.md", *rows] == navigation(), "one reading order"
    assert re.findall(r"^  - (.*):$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE) == TIERS
    assert re.findall(r"^\*\*(.*)\*\*$", index, re.MULTILINE) == TIERS


def words(text: str) -> int:
    """Words; a table's bars and dashes are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_pages_are_few_and_short() -> None:
    assert len(PAGES) <= MOST_PAGES
    assert sum(words(page.read_text()) for page in PAGES) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_opens_with_what_the_reader_can_do_after_it(page: Path) -> None:
    _, first, *_ = re.split(r"\n\n+", page.read_text())
    assert first.startswith("After this page "), first[:80]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_promises_what_is_coming(page: Path) -> None:
    assert not re.search(r"\b(is|are) coming\b|\bcoming soon\b|\bnot implemented\b|\bTODO\b", page.read_text())


A_FOR_PER = re.compile(
    r"(?i)\bso many\b|"
    r"\b(samples|bytes|(milli|micro)?seconds|s|ms|[kMG]B|times|once|twice|lines?|rows?|columns?|files?|threads|"
    r"messages|steps|one|two)"
    r"\s+an?\s+(step|second|minute|sample|epoch|worker|rank|kill|round|micro-batch|machine|process|command)\b"
    # "once a worker is in the fleet", "the fewest samples a step may count": no measure
    r"(?! (is|has|may|must|should|asks|does|left|of|or|with|to|in|whose|that|which)\b)"
)
"""So many, or "a step" where per step is meant."""


@pytest.mark.parametrize(
    "page",
    [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *PAGES],
    ids=lambda page: page.name,
)
def test_no_page_says_so_many_or_a_step_where_it_means_a_number_and_per_step(page: Path) -> None:
    assert not A_FOR_PER.search(without_code(page.read_text()))


def test_no_text_of_the_library_says_a_step_where_it_means_per_step() -> None:
    library = [file for file in SOURCES if "src" in file.parts]
    said = [(file, text) for file in library for text in texts_of(file)]
    assert len(said) > 1000
    assert not [(file.name, found[0]) for file, text in said if (found := A_FOR_PER.search(text))]


def texts_of(file: Path) -> list[str]:
    """Return the strings and docstrings of a source file, with a measure in place of what an f-string puts in."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    pieced = [[p.value if isinstance(p, ast.Constant) else "5 ms" for p in f.values]
              for f in nodes if isinstance(f, ast.JoinedStr)]  # fmt: skip
    return plain + ["".join(map(str, pieces)) for pieces in pieced]


def test_a_for_per_is_noticed_and_other_uses_of_a_are_not() -> None:
    for text in (
        "32 samples a rank",
        "Samples a second",
        "one row a worker",
        "0.4 s a kill",
        "50 ms a step",
        "threads a worker: 1",
    ):
        assert A_FOR_PER.search(text), text
    for text in (
        "32 samples per rank",
        "once a worker is in the fleet",
        "the samples a step may count",
        "share a step",
    ):
        assert not A_FOR_PER.search(text), text


def test_the_ten_words_stand_on_one_screen_of_the_home_page() -> None:
    section = (ROOT / "docs" / "index.md").read_text().partition("## Ten words\n")[2]
    told = re.findall(r"^\| \*\*(\w+)\*\* \|", section, re.MULTILINE)
    assert sorted(told) == sorted(TEN_WORDS)
    assert section.strip().count("\n") <= LINES_OF_A_SCREEN


def test_the_readme_is_short_and_shows_a_picture_and_the_two_commands() -> None:
    assert len(README.split()) < MOST_WORDS_OF_README
    for words_of_it in ("make demo", "make test", "/docs/images/front.png"):
        assert words_of_it in README
    assert (ROOT / "docs" / "images" / "front.png").stat().st_size < 250_000


def test_the_readme_says_in_its_first_lines_what_ran_where() -> None:
    status = [line for line in README.splitlines() if line][2]
    for word in ("Status", "emulated", "H200", "physical computers"):
        assert word in status


def test_the_quick_start_has_the_script_of_the_readme() -> None:
    texts = README, (ROOT / "docs" / "quickstart.md").read_text()
    scripts = [re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0] for text in texts]
    assert len({ast.dump(ast.parse(script)) for script in scripts}) == 1


def test_the_reference_describes_every_public_name() -> None:
    described = re.findall(r"^::: paceline\.\S*?(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert not {*paceline.__all__, *paceline.research.__all__} - set(described)


def test_every_name_of_a_fleet_its_steps_and_a_step_that_a_page_uses_exists() -> None:
    known = {"fleet": Fleet, "steps": Steps, "step": Step}
    used = {
        (name, member)
        for page in [ROOT / "README.md", *PAGES]
        for name, member in re.findall(r"(?<![\w./])(fleet|steps|step)\.([a-z]\w*)\b", page.read_text())
        if member not in ("py", "toml")
    }
    assert len(used) > 30
    assert not {(name, member) for name, member in used if member not in members_of(known[name])}


def members_of(kind: type) -> set[str]:
    """Return the public members of a class, those that its methods set included."""
    return {*dir(kind), *re.findall(r"\bself\.([a-z]\w*)\b", inspect.getsource(kind))}


# -- commands ----------------------------------------------------------------------------------------------------------


@cache
def commands() -> dict[str, Any]:
    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def shown_commands(text: str) -> list[str]:
    """Return every call of ``paceline`` in a block of a shell or in backticks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if kind in ("", "sh", "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", without_code(text))
    calls = [re.search(r"(?:^|[\s'(])(paceline [a-z]+(?: .*)?)$", line.split("   #")[0].rstrip()) for line in lines]
    return [call[1] for call in calls if call and "paceline: " not in call[0] and not call[1].endswith("...")]


def wrong_parts(call: str) -> list[str]:
    """Return the command or the options of a call that the command line does not have."""
    _, name, *parts = shlex.split(re.split(r" && | \|\| |; | > ", call)[0].rstrip("'`;"), comments=True)
    if name not in commands():
        return [name]
    options = {flag: one for one in commands()[name].params for flag in (*one.opts, *one.secondary_opts)}
    parts = [part for part in parts if part != "--help"]
    wrong, left = [], list(parts)
    while left:
        part = left.pop(0)
        if not part.startswith("-"):
            if name == "run":  # what follows the script is the script's
                break
            continue
        flag, _, value = part.partition("=")
        if flag not in options:
            wrong.append(flag)
        elif not options[flag].is_flag and not value and left:
            left.pop(0)
    return wrong


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_command_and_option_on_a_page_exists(page: Path) -> None:
    wrong = {call: parts for call in shown_commands(page.read_text()) if (parts := wrong_parts(call))}
    assert not wrong


def test_commands_are_found_and_wrong_ones_are_noticed() -> None:
    assert sum(len(shown_commands(page.read_text())) for page in PAGES) > 70
    assert shown_commands("```\nssh box paceline doctor --answer    # there\n```\n`paceline run -n 4 t.py`") == [
        "paceline doctor --answer",
        "paceline run -n 4 t.py",
    ]
    assert wrong_parts("paceline run -n 2:8 --sped 3 train.py --lr 0.1") == ["--sped"]
    assert wrong_parts("paceline runn train.py") == ["runn"]
    assert wrong_parts("paceline report RUN --html") == []


def test_every_variable_that_the_library_reads_is_in_the_reference_and_no_other() -> None:
    inside = {"PACELINE_", "PACELINE_GROUP_FIRST", "PACELINE_GROUP_DEVICES"}
    library = [file for file in SOURCES if "src" in file.parts and file.name != "renamed.py"]  # that has former names
    read = {name for file in library for name in variables(file)} - inside
    table = variables(ROOT / "docs" / "reference.md")
    assert table == read
    for page in [ROOT / "README.md", *PAGES]:
        assert not variables(page) - read, page.name


def variables(file: Path) -> set[str]:
    return set(re.findall(r"\bPACELINE_[A-Z_]*", file.read_text()))


# -- figures -----------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MEASURE = re.compile(r"\d(?:\.\d+)? (?:times|%|s\b|ms\b)")
"""A measured figure: a number with the unit in which figures are quoted."""


def figures() -> dict[str, str]:
    """Return the row of docs/evidence.md behind each anchor of a figure: its bold value and what it is of."""
    page = (ROOT / "docs" / "evidence.md").read_text()
    rows = re.findall(r'^\| <a id="(fig-[\w-]+)"></a>(.*)$', page, re.MULTILINE)
    return dict(rows)


def quotes(text: str) -> list[tuple[str, str]]:
    """Return (words, anchor) of every link to a figure."""
    return re.findall(r"\[([^\]]+)\]\([^)\s]*#(fig-[\w-]+)\)", text)


def test_every_figure_that_a_page_quotes_is_the_one_on_the_page_of_evidence() -> None:
    table = figures()
    found = [(page.name, *quote) for page in [ROOT / "README.md", *PAGES] for quote in quotes(page.read_text())]
    assert len(found) > 12
    for page, said, anchor in found:
        (value,) = re.findall(r"\*\*(.+?)\*\*", table[anchor])
        assert NUMBER.findall(said) in ([], NUMBER.findall(value)), f"{page}: {said} is not {value}"


def test_every_figure_has_one_value_and_is_quoted_somewhere() -> None:
    texts = "".join(page.read_text() for page in [ROOT / "README.md", *PAGES])
    quoted = {anchor for _, anchor in quotes(texts)}
    for anchor, row in figures().items():
        assert len(re.findall(r"\*\*(.+?)\*\*", row)) == 1, anchor
        assert anchor in quoted, f"{anchor}: an anchor that no page uses"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_readme_and_the_home_page_have_no_figure_of_their_own(page: str) -> None:
    prose = re.sub(r"\[[^\]]+\]\([^)]*#fig-[\w-]+\)", "", without_code((ROOT / page).read_text()))
    allowed = {"3 %"}  # the setting least_gain of the default pace
    assert set(MEASURE.findall(prose)) <= allowed
