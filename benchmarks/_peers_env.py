"""The peers' own environment, made by pip with the repository's constraints; Paceline's stays as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ["torch", "numpy", "rich", "typer", "scikit-learn"]
PEERS = {"torchft": "torchft-nightly", "hivemind": "hivemind==1.1.12", "lightning": "lightning", "ray": "ray[train]"}
PACKAGES = ["torch", "torchft-nightly", "hivemind", "lightning", "ray"]
VERSIONS_CODE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def make(folder: Path) -> tuple[str, dict[str, str]]:
    """The environment's interpreter, and why a peer is not in it, by peer. Made once; later calls find it."""
    python, done = folder / "bin" / "python", folder / "installed.json"
    asked = [*NEEDED, *PEERS.values(), (ROOT / "constraints.txt").read_text()]
    if done.exists() and (kept := json.loads(done.read_text()))["asked"] == asked:
        return str(python), kept["missing"]
    print(f"making the peers' environment in {folder} (two to five minutes, once) ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if said := _install(python, *NEEDED):
        raise SystemExit(f"the peers' environment could not be made: {said}")
    missing = {name: said for name, package in PEERS.items() if (said := _install(python, package))}
    done.write_text(json.dumps({"asked": asked, "missing": missing}))
    return str(python), missing


def _install(python: Path, *packages: str) -> str:
    """Empty, or the last line that pip said."""
    print(f"  {' '.join(packages)}", file=sys.stderr, flush=True)
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    done = subprocess.run([*map(str, command), *packages], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def versions(python: str) -> dict[str, str]:
    done = subprocess.run([python, "-c", VERSIONS_CODE, *PACKAGES], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))
