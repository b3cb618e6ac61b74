"""One GPU with two CPU workers beside it, over Gloo: they sit out where they would hurt, and help where they can.

Two settings. *large*: a ConvNet on 224x224 images, where one sample on a CPU takes longer than the GPU's whole step, so
the CPUs must sit out at no cost. *small*: a little MLP, where the GPU spends its time starting kernels and the CPUs
must help. Each is run by the GPU alone, by all three in Paceline and, for *large*, by all three in plain DDP.
Needs a GPU, torch and NumPy, nothing more.

    PYTHONPATH=src python benchmarks/gpu_beside_cpu.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from _smoke import free_port, goes_without, smoke
from overhead import convnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import paceline

SETTINGS = {
    "large": {"global_batch": 128, "micro_batch": 64, "steps": 160, "skip": 20, "shape": (3, 224, 224)},
    "small": {"global_batch": 2048, "micro_batch": 64, "steps": 300, "skip": 50, "shape": (64,)},
}
globals().update(
    smoke(SETTINGS={name: one | {"steps": 6, "skip": 2, "global_batch": 64} for name, one in SETTINGS.items()})
)


class Noise(Dataset):
    """Random images without a disk: a few, given again and again."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(512, *shape, generator=generator)
        self.y = torch.randint(0, 10, (512,), generator=generator)

    def __len__(self) -> int:
        return 1 << 20

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.as_tensor(indices) % 512
        return self.x[where], self.y[where]


def collate(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "large":
        return convnet()
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(name: str) -> dict[str, object]:
    """Paceline, alone or in the fleet: seconds of each step and who did how much."""
    setting = SETTINGS[name]
    data = torch.utils.data.DataLoader(Noise(setting["shape"]), collate_fn=collate, batch_size=setting["micro_batch"])
    with paceline.join(quiet=True, run_dir=tempfile.mkdtemp()) as fleet:
        model = fleet.model(network(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        seconds, began = [], time.perf_counter()
        for step in fleet.steps(
            data, global_batch=setting["global_batch"], micro_batch=setting["micro_batch"], shuffle=False
        ):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.commit(optimizer)
            if fleet.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            if step.index == setting["steps"] - 1:
                break
        return {"seconds": seconds, "samples": [record.samples for record in fleet.history]}


def train_ddp(name: str) -> dict[str, object]:
    """Plain DDP on the same three devices, equal shares, two steps: enough to see its pace."""
    setting, device = SETTINGS[name], torch.device(os.environ["PACELINE_DEVICE"])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(name).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data, share, seconds = Noise(setting["shape"]), setting["global_batch"] // dist.get_world_size(), []
    for number in range(2):
        began = time.perf_counter()
        x, y = data.__getitems__(list(range(number * share, (number + 1) * share)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return {"seconds": seconds}


def start(name: str, role: str, devices: list[str]) -> dict[str, object]:
    """Run a role on these devices; worker 0's answer."""
    port = free_port()
    processes = []
    for rank, device in enumerate(devices):
        env = {**os.environ, "PACELINE_DEVICE": device, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if len(devices) > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(len(devices)), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen([sys.executable, __file__, role, name], env=env, stdout=subprocess.PIPE))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{role} {name}: a worker failed")
    return json.loads(outputs[0].splitlines()[-1])


def speed(name: str, answer: dict[str, object]) -> float:
    """Samples a second after warm-up, rare probes of idle workers included."""
    setting = SETTINGS[name]
    return setting["global_batch"] / float(np.mean(answer["seconds"][setting["skip"] :]))


def compare(name: str) -> dict[str, float]:
    """The GPU alone, then all three: their speeds and what the CPUs did."""
    skip = SETTINGS[name]["skip"]
    alone, fleet = start(name, "train", ["cuda:0"]), start(name, "train", ["cuda:0", "cpu", "cpu"])
    shares = np.array(fleet["samples"])
    over, helped = speed(name, fleet) / speed(name, alone), float(shares[skip:, 1:].sum() / shares[skip:].sum())
    print(f"{name}: GPU alone {speed(name, alone):,.0f} samples/s, with two CPUs {speed(name, fleet):,.0f}: {over:.3f}")
    print(f"  the CPUs did {helped:.1%}; shares {shares[:5].tolist()} ... {shares[-3:].tolist()}", flush=True)
    return {
        f"{name}_gpu_samples_per_s": round(speed(name, alone), 1),
        f"{name}_fleet_over_gpu": round(over, 4),
        f"{name}_cpu_samples": round(helped, 4),
    }


def main() -> None:
    if goes_without("a GPU", here=torch.cuda.is_available()):
        return
    figures = compare("large") | compare("small")
    ddp = start("large", "train_ddp", ["cuda:0", "cpu", "cpu"])
    ddp_speed = SETTINGS["large"]["global_batch"] / ddp["seconds"][-1]
    figures["large_ddp_over_gpu"] = round(ddp_speed / figures["large_gpu_samples_per_s"], 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps({"train": train, "train_ddp": train_ddp}[sys.argv[1]](sys.argv[2])))
    else:
        main()
