"""Transformers' Trainer: `PacelineTrainer` on emulated machines 1,1,2,4 over the stock Trainer with DDP, and alone over
the plain Trainer.

The four workers train a small GPT-2 by the stock Trainer, then by ours, in one run; DDP's waiting lies in the padded
time, so it is at its best. Alone, one process with both trainers makes a step of the one and a step of the other in
turn: the figure is the median over pairs of neighbouring steps.

    python benchmarks/_frameworks_trainer.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import torch
from _smoke import forked, free_port, smoke, smoking
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from paceline.adapters.transformers import PacelineArguments, PacelineTrainer
from paceline.machines import from_env

MACHINES, SAMPLE_MS, GLOBAL_BATCH, STEPS, SKIPPED = "1,1,2,4", 20.0, 128, 12, 4
ALONE_BATCH, PAIRS, WIDTH, LENGTH = 16, 40, 256, 64
globals().update(smoke(SAMPLE_MS=0.2, GLOBAL_BATCH=16, STEPS=4, SKIPPED=2, PAIRS=3, WIDTH=16, LENGTH=16))
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_ARENA_MAX": "1"}
"""For both sides, which run on two threads of one process: the page faults of getting large blocks again are larger
than the difference that is measured."""
USUAL: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
USUAL |= {"logging_strategy": "no", "learning_rate": 1e-4}


def model(width: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": width, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def texts(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class Stamps(TrainerCallback):
    """The clock after each step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append(time.perf_counter())

    @property
    def samples_per_s(self) -> float:
        return GLOBAL_BATCH * (len(self.at) - SKIPPED) / (self.at[-1] - self.at[SKIPPED - 1])


class EmulatedTrainer(Trainer):
    """The stock Trainer on the machine that this worker plays."""

    def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        started = time.perf_counter()
        loss = super().training_step(model, inputs, *more)
        machine = from_env(int(os.environ["RANK"]))
        assert machine is not None
        machine.pad(self.state.global_step, len(inputs["labels"]), started)
        return loss


def on_machines() -> dict[str, float]:
    """One worker's part: samples/s of the stock Trainer and of ours."""
    torch.set_num_threads(1)
    folder, rows = tempfile.mkdtemp(), texts(GLOBAL_BATCH * STEPS, 16)
    size = int(os.environ["WORLD_SIZE"])
    ddp, ours = Stamps(), Stamps()
    args = TrainingArguments(folder, per_device_train_batch_size=GLOBAL_BATCH // size, num_train_epochs=1, **USUAL)
    EmulatedTrainer(model(16), args, train_dataset=rows, callbacks=[ddp]).train()
    args = PacelineArguments(folder, global_batch=GLOBAL_BATCH, micro_batch=8, quiet=True, num_train_epochs=1, **USUAL)
    trainer = PacelineTrainer(model(16), args, train_dataset=rows, callbacks=[ours])
    trainer.train()
    trainer.end()
    return {"ddp": ddp.samples_per_s, "ours": ours.samples_per_s}


class Turns(TrainerCallback):
    """Two trainings, each on its thread, of which one makes a step at a time."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self._mine, self._other, self._began = mine, other, 0.0
        self.seconds: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._take()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self._other.release()
        self._take()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._other.release()

    def _take(self) -> None:
        self._mine.acquire()
        self._began = time.perf_counter()


def alone() -> dict[str, float]:
    """Seconds of a step of ours over the plain Trainer's."""
    torch.set_num_threads(1)
    steps, folder = PAIRS + 5, tempfile.mkdtemp()
    rows, first, second = texts(ALONE_BATCH * steps, LENGTH), threading.Semaphore(1), threading.Semaphore(0)
    plain, ours = Turns(first, second), Turns(second, first)
    # Both are made before either trains: what Accelerate keeps for the whole process is then the same for both.
    args = TrainingArguments(folder, per_device_train_batch_size=ALONE_BATCH, max_steps=steps, **USUAL)
    theirs = Trainer(model(WIDTH), args, train_dataset=rows, callbacks=[plain])
    args = PacelineArguments(
        folder, global_batch=ALONE_BATCH, micro_batch=ALONE_BATCH, max_steps=steps, quiet=True, **USUAL
    )
    trainer = PacelineTrainer(model(WIDTH), args, train_dataset=rows, callbacks=[ours])
    thread = threading.Thread(target=theirs.train)
    thread.start()
    trainer.train()
    thread.join()
    trainer.end()
    mine, other = np.array(ours.seconds[5:]), np.array(plain.seconds[5:])
    return {"ratio": float(np.median(mine / other)), "ours_ms": 1e3 * float(np.median(mine)), "pairs": len(mine)}


def start(part: str, workers: int) -> dict[str, float]:
    """Run a part in processes of its own; worker 0's figures."""
    emulated = {"PACELINE_EMULATE": MACHINES, "PACELINE_SAMPLE_MS": str(SAMPLE_MS)} if workers > 1 else {}
    folder = {"PACELINE_RUN_DIR": f"{tempfile.mkdtemp()}/run"}
    if smoking():
        return dict(forked(PARTS[part], workers, **emulated, **folder)[0])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **KEEP_MEMORY, **emulated, **folder}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(workers):
        place = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank} if workers > 1 else {}
        env = shared | {name: str(value) for name, value in place.items()}
        processes.append(subprocess.Popen([sys.executable, __file__, part], env=env, stdout=subprocess.PIPE))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{part}: a worker failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


PARTS = {"machines": on_machines, "alone": alone}


def trainer_figures() -> dict[str, float]:
    """``trainer_over_ddp``: samples/s over the stock Trainer's; ``trainer_alone_over_plain``: seconds a step over the
    plain Trainer's."""
    speeds, lone = start("machines", 4), start("alone", 1)
    print(
        f"machines {MACHINES}: {speeds['ours']:.1f} samples/s, stock Trainer with DDP {speeds['ddp']:.1f}", flush=True
    )
    print(f"alone: {lone['ours_ms']:.1f} ms a step, over {lone['pairs']:.0f} pairs", flush=True)
    over = {"trainer_over_ddp": speeds["ours"] / speeds["ddp"], "trainer_alone_over_plain": lone["ratio"]}
    return {name: round(value, 4) for name, value in over.items()}


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PARTS:
        print(json.dumps(PARTS[sys.argv[1]]()))
    else:
        print(json.dumps(trainer_figures()))
