"""What Paceline costs one fast GPU alone: a step of a GPT in bf16 over the same step of a plain loop.

Two models: GPT-2's shape (124M parameters with a vocabulary of 50,257) on 8 sequences of 1,024 tokens, where the GPU is
the limit, and a small one (4M) on 8 of 128, where starting kernels is. Four micro-batches a step, fused AdamW, clipped
to norm 1. Plain loop and Paceline take turns by blocks of steps in one process. The plain loop indexes a tensor in
memory and pins the rows, the cheapest loading that does not make the host wait; Paceline loads through its own feed.
Under torch.compile once more, for the compiled forward alone. Needs a GPU, torch and NumPy, nothing more.

Beside each ratio, from torch.profiler, per step of Paceline and of the plain loop: *host_waits*, the calls in which the
host waits for a stream, an event or the device; *gaps_ms*, the milliseconds in which the GPU has nothing to do, gaps
above 50 microseconds.

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


WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
GAP_US, PROFILED = 50.0, 6


def profiled(steps: Iterator[None]) -> tuple[float, float]:
    """Host waits, and milliseconds without work for the GPU, per step."""
    torch.cuda.synchronize()
    next(steps)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            next(steps)
    events = profile.events()
    waits = sum(event.name in WAITS for event in events) - 1  # the profiler waits for the device when it ends
    on_gpu = [event.time_range for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    gaps_us, until = 0.0, float("inf")
    for one in sorted(on_gpu, key=lambda one: one.start):
        gaps_us += one.start - until if one.start - until > GAP_US else 0.0
        until = one.end if until == float("inf") else max(until, one.end)
    return waits / PROFILED, 1e-3 * gaps_us / PROFILED


def compare(shape: Shape, *, compiled: bool = False) -> dict[str, float]:
    """Milliseconds a step of Paceline and of the plain loop, the median over neighbouring blocks of their ratio, and
    the host's waits and the GPU's gaps."""
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
            (our_waits, our_gaps), (waits, gaps) = profiled(ours), profiled(plain)
    torch.cuda.empty_cache()
    return {
        "ours_ms": round(1e3 * statistics.median(a for a, _ in pairs), 3),
        "plain_ms": round(1e3 * statistics.median(b for _, b in pairs), 3),
        "over_plain": round(statistics.median(mine / theirs for mine, theirs in pairs), 4),
        "host_waits": round(our_waits, 2),
        "plain_host_waits": round(waits, 2),
        "gaps_ms": round(our_gaps, 3),
        "plain_gaps_ms": round(gaps, 3),
    }


def main() -> None:
    if goes_without("a GPU", here=torch.cuda.is_available()):
        return
    torch.set_float32_matmul_precision("high")
    figures: dict[str, float] = {}
    for name, shape in SHAPES.items():
        for compiled in (False, True):
            label = f"{name}_compiled" if compiled else name
            found = compare(shape, compiled=compiled)
            print(f"{label}: {found}", flush=True)
            figures |= {f"{label}_{name}": value for name, value in found.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
