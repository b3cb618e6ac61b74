"""What Paceline costs one fast GPU alone: a step of a GPT in bf16 over the same step of a plain loop.

Two models: GPT-2's shape (124M parameters with a vocabulary of 50,257) on 8 sequences of 1,024 tokens, where the GPU is
the limit, and a small one (4M) on 8 of 128, where starting kernels is. Four micro-batches a step, fused AdamW, clipped
to norm 1. Plain loop and Paceline take turns by blocks of steps in one process. The plain loop indexes a tensor in
memory and pins the rows, the cheapest loading that does not make the host wait; Paceline loads through its own feed.
Under torch.compile once more, for the compiled forward alone. Needs a GPU, torch and NumPy, nothing more.

    PYTHONPATH=src python benchmarks/gpu_alone.py
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from _smoke import goes_without
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline

MICRO, PIECES = 8, 4
WARM_UP, BLOCKS = 8, 6
BLOCK_S = 1.2
"""About how long a block of steps takes."""


class Shape(NamedTuple):
    """Of a GPT: width, heads, layers, words it knows, and the length of its sequences."""

    width: int
    heads: int
    layers: int
    words: int
    length: int


SHAPES = {"gpt124": Shape(768, 12, 12, 50257, 1024), "gpt4": Shape(192, 6, 6, 8192, 128)}


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Words in, the next words' scores out; the first and the last layer share their weight, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm, self.scores = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False)
        self.scores.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        return self.scores(self.norm(self.blocks(self.words(words) + self.places(places))))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    with torch.autocast(words.device.type, dtype=torch.bfloat16):
        scores = model(words)
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def data_of(shape: Shape, steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(shape.words, (MICRO * PIECES * steps, shape.length))


def model_of(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return GPT(shape)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_steps(shape: Shape, *, compiled: bool) -> Iterator[None]:
    """A plain training loop; each ``next`` is one step."""
    model = model_of(shape).cuda()
    run = torch.compile(model) if compiled else model
    optimizer, data = adam(model), data_of(shape, 16)
    while True:
        for index in torch.randperm(len(data)).view(-1, PIECES, MICRO):
            for rows in index:
                words = data[rows].pin_memory().cuda(non_blocking=True)
                (loss_of(run, words) / PIECES).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def paceline_steps(fleet: paceline.Fleet, shape: Shape, *, compiled: bool) -> Iterator[None]:
    """The same loop in Paceline."""
    model = fleet.model(model_of(shape))
    run = torch.compile(model) if compiled else model
    optimizer = adam(model)
    fleet.track(optimizer=optimizer)
    data = TensorDataset(data_of(shape, 16))
    for step in fleet.steps(data, global_batch=MICRO * PIECES, micro_batch=MICRO, epochs=1000):
        for (words,) in step:
            step.backward(loss_of(run, words))
        step.commit(optimizer, clip_norm=1.0)
        yield


def seconds_of(steps: Iterator[None], count: int) -> float:
    """Seconds a step, until the GPU is done with the last."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def compare(shape: Shape, *, compiled: bool = False) -> tuple[float, float, float]:
    """Milliseconds a step of Paceline and of the plain loop, and the median over neighbouring blocks of their ratio."""
    with paceline.join(quiet=True, run_dir=tempfile.mkdtemp()) as fleet:
        ours, plain = paceline_steps(fleet, shape, compiled=compiled), plain_steps(shape, compiled=compiled)
        with contextlib.closing(ours), contextlib.closing(plain):
            for steps in (ours, plain):
                seconds_of(steps, WARM_UP)
            count = max(4, round(BLOCK_S / seconds_of(plain, 4)))
            pairs = []
            for number in range(BLOCKS):
                pair = {}
                for which in ("ours", "plain") if number % 2 else ("plain", "ours"):
                    pair[which] = seconds_of(ours if which == "ours" else plain, count)
                pairs.append((pair["ours"], pair["plain"]))
    torch.cuda.empty_cache()
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    return 1e3 * statistics.median(a for a, _ in pairs), 1e3 * statistics.median(b for _, b in pairs), ratio


def main() -> None:
    if goes_without("a GPU", here=torch.cuda.is_available()):
        return
    torch.set_float32_matmul_precision("high")
    figures = {}
    for name, shape in SHAPES.items():
        for compiled in (False, True):
            label = f"{name}_compiled" if compiled else name
            ours, plain, ratio = compare(shape, compiled=compiled)
            print(f"{label}: {ours:.2f} ms a step, a plain loop {plain:.2f} ms: {ratio:.3f}", flush=True)
            figures |= {f"{label}_over_plain": round(ratio, 4)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
