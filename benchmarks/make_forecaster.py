"""Makes the general forecast that comes with Paceline: ``src/paceline/research/general.npz``.

Clusters of `_cluster_family.py` are played with P3's cut-off by the forecast itself, so that what it learns from is
censored as in a run: first with experts weighed by hand, then with the gate learned from that. At every step the
experts' advice for some workers is kept beside the true times, hidden ones too. The gate is the one with the highest
likelihood of these: ``sum log sum_k w_k N(log x; m_k, s_k^2)``. The same numbers of clusters give the same file on the
same machine; the number of processes changes nothing.

    python benchmarks/make_forecaster.py --write      # in place of the one that is there
    python benchmarks/make_forecaster.py              # made, judged and thrown away
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import sys
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from _cluster_family import cluster
from _smoke import smoke

from paceline.pace.forecast import Seen, best_count
from paceline.research import experts, gate
from paceline.research.experts import EXPERTS, advise
from paceline.research.general import General

FIRST, THEN = 150, 600
"""Clusters of the two rounds."""
STEPS, EARLY = 100, 12
WORKERS, WORKERS_EARLY = 5, 10
"""Workers whose advice is kept at each step, and in each of the early ones."""
HIDDEN, EPOCHS, BATCH, RATE = 32, 8, 512, 3e-3
HELD_OUT = 0.1
CHUNK = 20
globals().update(smoke(FIRST=4, THEN=4, STEPS=16, EPOCHS=1, CHUNK=2))

BY_HAND = (1.0, 1.0, 1.0, -1.0, -1.0, 2.0, -1.0, -3.0)
"""The experts' weights (log) that learning begins with."""
Arrays = dict[str, np.ndarray]


class Noting(gate.Gate):
    """A gate that keeps the advice it last read."""

    def believe(self, logs: np.ndarray, hidden: np.ndarray, ahead: int = 1) -> gate.LogMixture:
        self.advice = advise(logs, hidden, ahead)
        return self.mix(self.advice)


def by_hand() -> Arrays:
    features, k = advise(np.zeros((2, 2)), np.zeros((2, 2), dtype=bool)).features.shape[1], len(EXPERTS)
    sizes = {"w1": (features, 1), "b1": (1,), "w2": (1, 1), "b2": (1,), "w3": (1, 2 * k)}
    plain = {name: np.zeros(size) for name, size in sizes.items()}
    return {"centre": np.zeros(features), "scale": np.ones(features), **plain, "b3": np.array([*BY_HAND, *[0.0] * k])}


def episode(seed: int, weights: Arrays) -> list[np.ndarray]:
    """Advice and truth along one cluster: features, means, spreads, log seconds."""
    rng = np.random.default_rng((77, seed))
    seconds = cluster(rng, STEPS)
    size, waits, noting = seconds.shape[1], rng.random() < 0.25, Noting(weights)
    forecast, kept = General(noting), []
    forecast.observe(Seen.whole(seconds[0]))
    for step, own in enumerate(seconds[1:], start=1):
        first = best_count(forecast.draw(16, rng))
        if waits or rng.random() < 0.1:
            first = size
        some = rng.choice(size, min(size, WORKERS_EARLY if step < EARLY else WORKERS), replace=False)
        advice = noting.advice
        kept.append([each[some] for each in (advice.features, advice.means, advice.spreads, np.log(own))])
        forecast.observe(Seen.until(own, np.partition(own, first - 1)[first - 1]))
    return [np.concatenate(each).astype(np.float32) for each in zip(*kept, strict=True)]


def episodes(seeds: range, weights: Arrays) -> list[np.ndarray]:
    return [np.concatenate(each) for each in zip(*(episode(seed, weights) for seed in seeds), strict=True)]


def play(first: int, count: int, weights: Arrays, pool: ProcessPoolExecutor) -> list[torch.Tensor]:
    """So many clusters, from seed ``first`` on."""
    began = time.perf_counter()
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    parts = list(pool.map(episodes, chunks, [weights] * len(chunks)))
    told = [torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)]
    print(f"{count} clusters, {len(told[-1])} times: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return told


def learn(told: list[torch.Tensor], *, seed: int) -> tuple[Arrays, float]:
    """The gate with the highest likelihood, and minus its mean log likelihood on clusters that were held out."""
    torch.manual_seed(seed)
    features, means, spreads, truth = told
    k, kept = len(EXPERTS), int(len(truth) * (1 - HELD_OUT))
    centre, scale = features[:kept].mean(0), features[:kept].std(0).clamp_min(0.05)
    net = network(features.shape[1], k)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        out = net((features[rows] - centre) / scale)
        log_spread = spreads[rows].log() + out[:, k:].clamp(-gate.MOST_STRETCH, gate.MOST_STRETCH)
        off = (truth[rows, None] - means[rows]) / log_spread.exp()
        each = torch.log_softmax(out[:, :k], 1) - log_spread - off**2 / 2 - 0.5 * np.log(2 * np.pi)
        return -torch.logsumexp(each, 1)

    batches = max(kept // BATCH, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * batches + 1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(kept)[: batches * BATCH].chunk(batches):
            optimizer.zero_grad()
            loss(rows).clamp(max=12.0).mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        held_out = float(loss(torch.arange(kept, len(truth))).mean())
    layers = {f"w{i + 1}": net[2 * i].weight.detach().T.numpy() for i in range(3)}
    layers |= {f"b{i + 1}": net[2 * i].bias.detach().numpy() for i in range(3)}
    return {"centre": centre.numpy(), "scale": scale.numpy(), **layers}, held_out


def network(features: int, k: int) -> torch.nn.Sequential:
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    net = torch.nn.Sequential(linear(features, HIDDEN), tanh(), linear(HIDDEN, HIDDEN), tanh(), linear(HIDDEN, 2 * k))
    with torch.no_grad():
        net[4].weight.mul_(0.1)
        net[4].bias.copy_(torch.tensor([*BY_HAND, *[0.0] * k]))
    return net


def recipe() -> str:
    """A checksum of what the file depends on: this script, the family, the experts and the gate; comments, docstrings
    and imports left out."""
    here = Path(__file__)
    sources = [here, here.with_name("_cluster_family.py"), *(Path(part.__file__) for part in (experts, gate))]
    told = hashlib.sha256()
    for source in sources:
        told.update(_code(source).encode())
    return told.hexdigest()[:16]


def _code(source: Path) -> str:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not (_is_text(line) or isinstance(line, ast.Import | ast.ImportFrom))]
    return ast.dump(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def packed(arrays: Arrays, about: str) -> bytes:
    """An .npz without the time it was written, so that the same weights are the same bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in {**arrays, "recipe": np.array(about)}.items():
            part = io.BytesIO()
            np.save(part, array if name == "recipe" else array.astype(np.float32))
            file.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), part.getvalue())
    return content.getvalue()


def make(processes: int) -> tuple[bytes, float]:
    """The file's content, and the held-out score of its gate."""
    torch.set_num_threads(1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        weights, _ = learn(play(0, FIRST, by_hand(), pool), seed=0)
        weights, held_out = learn(play(10_000, THEN, weights, pool), seed=1)
    return packed(weights, recipe()), held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it in place of the one in the package")
    parser.add_argument("--output", type=Path, help="write it there")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    content, held_out = make(asked.processes)
    for target in filter(None, [asked.output, gate.FILE if asked.write else None]):
        target.write_bytes(content)
    told = {"held_out": round(held_out, 4), "bytes": len(content), "recipe": recipe()}
    print(json.dumps({**told, "sha256": hashlib.sha256(content).hexdigest(), "clusters": FIRST + THEN}))


if __name__ == "__main__":
    main()
