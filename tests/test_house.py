"""The house around the library: versions, addresses, workflows and containers agree with one another."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.doctor import NEWEST_TESTED, OLDEST_TORCH

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKE, re.MULTILINE))
OTHERS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"}
OTHERS |= {"pypa/gh-action-pypi-publish"}


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_make_targets_and_known_actions_alone(workflow: Path) -> None:
    read = yaml.safe_load(workflow.read_text())
    assert {"name", True, "permissions", "jobs"} <= set(read), "YAML reads the key `on` as True"
    assert read["permissions"] == {"contents": "read"}
    for job in read["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        for needed in [job["needs"]] if "needs" in job else []:
            assert needed in read["jobs"]
    for step in steps(workflow):
        if "run" in step:
            assert (found := re.fullmatch(r"make ([a-z-]+)( [A-Z_]+=\S.*)?", step["run"])), step
            assert found[1] in TARGETS
        else:
            assert step["uses"].partition("@")[0] in OTHERS, step


def test_the_workflows_cover_lint_oldest_and_newest_torch_the_wheel_docs_and_a_release() -> None:
    called = {step["run"].split()[1] for path in WORKFLOWS for step in steps(path) if "run" in step}
    assert called == {"lint", "test", "test-torch", "test-wheel", "install-wheel", "docs", "check-tag"}
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    tried = [row["torch"] for row in checks["jobs"]["suite"]["strategy"]["matrix"]["include"]]
    versions = [tuple(int(part) for part in text.split(".")[:2]) for text in tried]
    assert min(versions) == OLDEST_TORCH
    assert max(versions) >= NEWEST_TESTED
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}, "trusted publishing: no password"
    assert [release["jobs"][job]["needs"] for job in ("publish", "build")] == ["build", "suite"]
    assert [step["run"] for step in release["jobs"]["suite"]["steps"] if "run" in step] == ["make test"]


# -- what is installed -------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "pytorch_optimizer": "pytorch-optimizer",
    "torchmetrics": "lightning",  # which brings it
    "yaml": "ray",  # likewise
}
"""Names on the index of modules that are called otherwise."""


def distributions(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=!~\[ ;]", one)[0].lower().replace("_", "-") for one in requirements}


def imported(nodes: Iterable[ast.AST], *, on_import: bool) -> Iterator[str]:
    """Yield the distributions that code imports; ``on_import``: only what runs when its module is imported."""
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for top in {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "paceline"}:
            yield DISTRIBUTIONS.get(top, top)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not for_types and not (on_import and function):
            yield from imported(ast.iter_child_nodes(node), on_import=on_import)


def test_what_a_module_imports_comes_with_the_package_or_with_the_extra_of_its_adapter() -> None:
    always = distributions(PROJECT["dependencies"])
    extras = {name: distributions(needed) for name, needed in PROJECT["optional-dependencies"].items()}
    library = ROOT / "src" / "paceline"
    used: set[str] = set()
    for file in sorted(library.rglob("*.py")):
        parts, tree = file.relative_to(library).parts, ast.parse(file.read_text())
        here = always | (extras[parts[1]] if parts[0] == "adapters" and len(parts) > 2 else set())
        assert set(imported([tree], on_import=True)) <= here, file
        used |= set(imported([tree], on_import=False))
    assert always <= used, "a dependency that nothing imports"
    assert used <= always.union(*(needed for name, needed in extras.items() if name not in ("dev", "docs", "peers")))


def test_the_floor_of_torch_is_the_doctors() -> None:
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in PROJECT["dependencies"]


def test_the_version_stands_in_one_place_and_what_repeats_it_agrees() -> None:
    assert PROJECT["dynamic"] == ["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == paceline.__version__
    assert f"\n## {paceline.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    made = subprocess.run(["make", "-s", "check-tag"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout
    other = subprocess.run(["make", "-s", "check-tag", "TAG=v9.9.9"], cwd=ROOT, capture_output=True, text=True)
    assert "v9.9.9 is not the version" in other.stdout


def test_every_address_of_the_project_is_one_of_those_in_pyproject() -> None:
    own = tuple(PROJECT["urls"][name] for name in ("Homepage", "Documentation"))
    kinds = ("*.md", "*.yml", "*.yaml", "*.cff", "*.toml", "*.py", "Dockerfile")
    listed = subprocess.run(["git", "ls-files", "--", *kinds], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split()]
    if not files:
        pytest.skip("not a git repository")
    strange = [
        f"{file.name}: {address}"
        for file in files
        for address in re.findall(r"https://[^\s)\"'>`]*paceline[^\s)\"'>`]*", file.read_text())
        if not address.startswith(own)
    ]
    assert not strange


def test_the_two_machines_of_the_compose_file_join_one_roster_with_options_that_exist() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"roster", "first", "second"}
    assert services["first"]["cpus"] > services["second"]["cpus"]
    words = [word for service in services.values() for word in " ".join(service["command"]).split()]
    known = subprocess.run(["git", "grep", "-h", "-o", "-E", "[a-z_]+: [A-Z][A-Za-z]+ = ", "--", "src/paceline/cli"],
                           cwd=ROOT, capture_output=True, text=True).stdout  # fmt: skip
    for option in {word for word in words if word.startswith("--")} - {"--min", "--max", "--epochs"}:
        assert f"{option.strip('-').replace('-', '_')}: " in known, option


def test_the_container_copies_what_the_package_is_built_from() -> None:
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for part in name.split():
            assert (ROOT / part).exists()
            assert part not in ignored
