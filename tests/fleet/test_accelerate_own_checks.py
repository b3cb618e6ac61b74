"""The checks in the scripts that Accelerate ships (accelerate.test_utils.scripts), on workers of a fleet.

The page's table names each: those that pass run here, on two and three workers, with Accelerate's class replaced.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from crew import nursery, run

if find_spec("accelerate") is None:
    pytest.skip("needs pip install 'paceline[accelerate]'", allow_module_level=True)

pytestmark = pytest.mark.fleet
ROOT = Path(__file__).parents[2]
ON_TWO = "on two"
"""Marks a check that asks for two processes, or for a number that divides eight."""

PASS: dict[str, list[Any]] = {
    "test_script": [
        "process_execution_check",
        "init_state_check",
        "rng_sync_check",
        ("dl_preparation_check", {}, ON_TWO),
        "custom_sampler_check",
        "check_seedable_sampler",
        "check_seedable_sampler_in_batch_sampler_shard",
        ("training_check", {"use_seedable_sampler": True}),
        "test_split_between_processes_list",
        "test_split_between_processes_nested_dict",
        ("test_split_between_processes_tensor", {}, ON_TWO),
        "test_split_between_processes_evenly",
        "test_trigger",
        "test_reinstantiated_state",
    ],
    "test_sync": ["test_dataloader_break"],
    "test_distributed_data_loop": [
        ("test_join_can_override_even_batches", {}, ON_TWO),
        ("test_join_can_override_for_mixed_type_dataloaders", {}, ON_TWO),
        ("test_join_raises_warning_for_iterable_when_overriding_even_batches", {}, ON_TWO),
        ("test_data_loader", {"loader": "in order"}),
        ("test_data_loader", {"loader": "shuffled"}),
        ("test_data_loader", {"loader": "batch sampler"}),
    ],
    "test_ops": [
        "test_gather",
        "test_gather_object",
        "test_gather_non_contiguous",
        "test_broadcast",
        "test_pad_across_processes",
        "test_reduce_sum",
        "test_reduce_mean",
        "test_reduce_max",
        "test_op_checker",
        "test_copy_tensor_to_devices",
    ],
    "external_deps.test_metrics": [
        ("test_torch_metrics", {"num_samples": 99}),
        ("test_torch_metrics", {"num_samples": 512}),
        "test_gather_for_metrics_drop_last",
    ],
}
"""Checks that pass, by their script."""


def checks(size: int) -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for script, entries in PASS.items():
        for entry in entries:
            name, given, *marks = (entry, {}) if isinstance(entry, str) else entry
            if size == 2 or ON_TWO not in marks:
                found.append((script, name, given))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_accelerates_own_checks_pass(size: int, tmp_path: Path) -> None:
    nursery().load("paceline.adapters.accelerate")
    for found in run("accelerate_cases.py:own_checks", size, tmp_path, args={"checks": checks(size)}):
        assert len(found) == len(checks(size))


def test_the_page_names_each_check_of_the_scripts() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    folder = Path(str(find_spec("accelerate.test_utils.scripts").submodule_search_locations[0]))  # type: ignore
    passing = {name for entries in PASS.values() for name in (e if isinstance(e, str) else e[0] for e in entries)}
    for script in (*PASS, "external_deps.test_checkpointing"):
        tree = ast.parse((folder / f"{script.replace('.', '/')}.py").read_text())
        names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
        for name in [n for n in names if n.startswith(("test_", "check_seed")) or n.endswith("_check")]:
            (row,) = [line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line]
            assert ("passes" in row.split("|")[2]) == (name in passing), name
