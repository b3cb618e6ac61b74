"""The README and the documentation's pages: links lead somewhere, every page is listed, every public name is described.

``make docs`` builds the site with ``--strict``; what can be seen without MkDocs is held here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
HOST = "https://github.com/paceline/paceline"
SITE = "https://paceline.github.io/paceline"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_repository() -> None:
    links = LINK.findall(README)
    assert len(links) > 5
    assert not [link for link in links if not file_of(link).exists()]


def file_of(link: str) -> Path:
    """The file in the repository behind an address of the project."""
    address = link.partition("#")[0]
    if address.startswith(SITE):
        return ROOT / "docs" / ((address.removeprefix(SITE).strip("/") or "index") + ".md")
    kind, _, path = address.removeprefix(f"{HOST}/").partition("/main/")
    assert address.startswith(HOST), f"{link} is no address of the project"
    assert kind in ("blob", "raw", "tree"), link
    return ROOT / path


def test_the_readme_is_short_and_shows_a_picture_and_the_two_commands() -> None:
    assert len(README.split()) < 700
    for words in ("make demo", "make test", "/docs/images/front.png"):
        assert words in README
    assert (ROOT / "docs" / "images" / "front.png").stat().st_size < 250_000


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
    """What a page's headings are called in addresses."""
    heads = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_index_and_the_site_list_every_page() -> None:
    names = {page.name for page in PAGES}
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(LINK.findall(index))
    assert not names - listed - {"index.md"}
    navigation = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert set(navigation) == names
    rows = re.findall(r"^\| \[.*?\]\((.*?)\)", index, re.MULTILINE)
    assert ["index.md", *rows] == navigation, "one reading order"


def test_the_reference_describes_every_public_name() -> None:
    described = re.findall(r"^::: paceline\.\S*?(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert not set(paceline.__all__) - set(described)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_promises_what_is_coming(page: Path) -> None:
    assert not re.search(r"\b(is|are) coming\b|\bcoming soon\b|\bnot implemented\b|\bTODO\b", page.read_text())
