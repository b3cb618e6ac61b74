"""A wire format that nobody has heard of: one class and one line, and all that takes a wire by name takes it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import BEFORE, apart, results

from paceline.observe import read_log
from paceline.transport.formats import SCALE_BYTES, BlockScaled, Format, in_blocks

pytestmark = pytest.mark.fleet


class Int4(Format):
    """An eighth of the bytes: two numbers per byte from -7 to 7, each block of 64 with a scale."""

    name = "int4"
    block = 64
    bytes_per_value = 0.5 + SCALE_BYTES / block
    error = "7 % of its block's largest"
    averages_only = True

    def row_bytes(self, count: int) -> int:
        return -(-count // self.block) * (self.block // 2 + SCALE_BYTES)

    def encode(self, values: torch.Tensor, row: torch.Tensor) -> None:
        blocks, rows = in_blocks(values, self.block), row.view(-1, self.block // 2 + SCALE_BYTES)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 7
        numbers = (blocks / scales.clamp_min(2.0**-126)).nan_to_num().round() + 8
        low, high = numbers.to(torch.uint8).view(len(blocks), -1, 2).unbind(2)
        rows[:, SCALE_BYTES:] = low + 16 * high
        rows[:, :SCALE_BYTES] = scales.view(torch.uint8)

    def decode(self, row: torch.Tensor, count: int) -> torch.Tensor:
        rows = row.view(-1, self.block // 2 + SCALE_BYTES)
        scales = rows[:, :SCALE_BYTES].contiguous().view(torch.float32)
        low, high = rows[:, SCALE_BYTES:] % 16, rows[:, SCALE_BYTES:] // 16
        numbers = torch.stack([low, high], dim=2).view(len(rows), -1).to(torch.float32) - 8
        return (numbers * scales).view(-1)[:count]


TOY = f"""from __future__ import annotations
import torch
from paceline.transport.formats import SCALE_BYTES, Format, in_blocks, register

{inspect.getsource(Int4)}
register(Int4)
"""
"""The class in a script of its own, and the one line."""

TRAIN = """
wire = os.environ["THE_WIRE"]
with paceline.join(combine=paceline.Averaging(every_steps=2), comm_dtype=wire) as fleet:
    model = fleet.model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fleet.track(optimizer=optimizer)
    for step in fleet.steps(data, global_batch=12, micro_batch=3, epochs=6):
        for a, b in step:
            step.backward(loss_fn(model(a), b))
        step.commit(optimizer)
    result = [flat(model), float(loss_fn(model(x), y))]
"""

FLEET = """
[model]
parameters = "20M"
batch = 64
sample_ms = 50

[[sites]]
name = "here"
bandwidth = "100mbit"
latency_ms = 5

[[machines]]
name = "one"
count = 2
speed = 1.0
"""


def paceline(folder: Path, *words: str | Path) -> str:
    """What the command prints, in a process that has imported the toy."""
    script = folder / "command.py"
    script.write_text(f"{TOY}\nfrom paceline.cli import main\nmain()\n")
    command = [sys.executable, str(script), *map(str, words)]
    wide = {**os.environ, "COLUMNS": "160"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=wide)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_toy_is_short_and_no_kind_of_ours() -> None:
    assert len(inspect.getsource(Int4).splitlines()) < 40
    assert not issubclass(Int4, BlockScaled)


def test_two_workers_train_over_it_and_its_report_says_how_exactly(tmp_path: Path) -> None:
    first, second = results(tmp_path / "int4", TRAIN, before=TOY + BEFORE, THE_WIRE="int4", WIRE_ALL="1")
    assert first == second, "the same bits on both"
    plain, _ = results(tmp_path / "plain", TRAIN, before=TOY + BEFORE, THE_WIRE="float32")
    start = results(tmp_path / "none", "result = [flat(network()), float(loss_fn(network()(x), y))]", workers=1)[0]
    assert 0 < apart(first[0], plain[0]) < 0.2 * apart(start[0], plain[0])
    assert first[1] < start[1] - 0.8 * (start[1] - plain[1])
    log = read_log(tmp_path / "int4" / "run")
    assert log.run["comm_dtype"] == "int4"
    count = len(first[0])
    assert log.loops[0]["round_bytes"] < read_log(tmp_path / "plain" / "run").loops[0]["round_bytes"] - 6 * count
    text = json.loads(paceline(tmp_path, "report", tmp_path / "int4" / "run", "--json"))["text"]
    assert "Updates crossed the network as int4, each number to 7 % of its block's largest" in text


def test_the_plan_has_a_column_for_it(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    printed = " ".join(paceline(tmp_path, "plan", tmp_path / "fleet.toml", "--steps", "30").split())
    assert "float32 float32 bf16 (int8) bf16 (int8) (int4) (int4)" in printed
    planned = json.loads(paceline(tmp_path, "plan", tmp_path / "fleet.toml", "--steps", "30", "--json"))["choices"]
    rounds = {one["comm_dtype"]: one["round_s"] for one in planned if one["combine"] == "average"}
    assert rounds["int4"] < 0.6 * rounds["int8"]
    assert "int4" not in {one["comm_dtype"] for one in planned if one["combine"] == "gradients"}


def test_the_command_line_offers_it_and_gradients_refuse_it(tmp_path: Path) -> None:
    assert "int8 or int4 with averages" in " ".join(paceline(tmp_path, "run", "--help").replace("│", " ").split())
    script = tmp_path / "refused.py"
    script.write_text(f"{TOY}\nimport paceline\npaceline.join(comm_dtype='int4', quiet=True)\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert "comm_dtype 'int4' is too coarse for single gradients" in ended.stderr
