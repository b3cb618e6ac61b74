"""The house around the library: versions, addresses, workflows and containers agree with one another."""

from __future__ import annotations

import re
import subprocess
import tomllib
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
    assert called == {"lint", "test-torch", "test-wheel", "docs", "check-tag"}
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    tried = [row["torch"] for row in checks["jobs"]["suite"]["strategy"]["matrix"]["include"]]
    versions = [tuple(int(part) for part in text.split(".")[:2]) for text in tried]
    assert min(versions) == OLDEST_TORCH
    assert max(versions) >= NEWEST_TESTED
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}, "trusted publishing: no password"


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
