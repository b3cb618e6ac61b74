"""Lets links that leave ``docs/``, as to ``../examples/digits.py``, work on the site as they do in the repository.

MkDocs calls `on_page_markdown` for every page. Such a link becomes the file's address on the project's host; one to a
file that is not there is a warning, which ``mkdocs build --strict`` takes for an error.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEAVES = re.compile(r"\]\(\.\./(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
logger = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **more: Any) -> str:
    """The page's text, with every link out of ``docs/`` absolute."""
    base = config["repo_url"].rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        path = ROOT / link["path"]
        if not path.exists():
            logger.warning("%s links to %s, which is not there", page.file.src_uri, link["path"])
        kind = "tree" if path.is_dir() else "blob"
        return f"]({base}/{kind}/main/{link['path']}{link['anchor'] or ''})"

    return LEAVES.sub(absolute, markdown)
