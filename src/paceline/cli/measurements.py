"""Small measurements: what a device can do, two processes adding a tensor, which way leads outwards."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from subprocess import TimeoutExpired
from typing import Any

ALL_REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor, times = torch.ones(1 << 18), []
for _ in range(11):
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    times.append(time.perf_counter() - started)
print(sorted(times[1:])[5] * 1000)
dist.destroy_process_group()
"""
SIOCGIFADDR = 0x8915
BATCH = 64


def all_reduce_ms(timeout_s: float = 30.0) -> tuple[float | None, str]:
    """Median milliseconds of adding 1 MB between two new processes; None and the reason when it does not work."""
    from paceline.launcher.rendezvous import Meeting
    from paceline.launcher.workers import Worker, how

    with Meeting() as meeting:
        meeting.host()
        workers = [Worker(rank, [sys.executable, "-c", ALL_REDUCE], _place(meeting, rank)) for rank in range(2)]
        try:
            said = [worker.process.communicate(timeout=timeout_s) for worker in workers]
        except TimeoutExpired:
            return None, f"no answer within {timeout_s:.0f} s"
        finally:
            for worker in workers:
                worker.send(9)
                worker.process.wait()
    for worker, (_, error) in zip(workers, said):
        if worker.process.returncode:
            lines = error.decode(errors="replace").strip().splitlines() or [how(worker.process.returncode)]
            return None, lines[-1]
    return float(said[0][0]), ""


def _place(meeting: Any, rank: int) -> dict[str, str]:
    from paceline.launcher.rendezvous import loopback

    return {
        **({"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}),
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def devices() -> list[str]:
    """Every device of this computer that a worker can be given."""
    import torch

    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *names, *(["mps"] if torch.backends.mps.is_available() else [])]


def probe(device: str, seconds: float) -> float:
    """Samples/s of a small ConvNet, forward and backward, measured for ``seconds`` of which a third is warm-up."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of `paceline run` has it
    try:
        net, x, y = _small_net(device)
        _train(net, x, y, device, seconds / 3)
        return _train(net, x, y, device, seconds * 2 / 3)
    finally:
        torch.set_num_threads(threads)


def _small_net(device: str) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return net.to(device), torch.randn(BATCH, 3, 32, 32).to(device), torch.randint(10, (BATCH,)).to(device)


def _train(net: Any, x: Any, y: Any, device: str, seconds: float) -> float:
    """Samples/s over ``seconds``; the device is waited for after every batch, so that the time is its own."""
    import torch

    batches, started = 0, time.perf_counter()
    while batches == 0 or time.perf_counter() - started < seconds:
        net.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        if device != "cpu":
            torch.accelerator.synchronize(device)
        batches += 1
    return batches * BATCH / (time.perf_counter() - started)


def interface_outwards(host: str | None = None) -> str | None:
    """``eth0 (10.0.0.7)``: where packets to ``host``, or to any other computer, leave; None when there is no way."""
    family = socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((host or "10.255.255.254", 9))  # sends nothing, only chooses the route
        except OSError:
            return None
        address = str(datagrams.getsockname()[0])
    name = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    return f"{name} ({address})" if name else address


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none or the system does not tell (not Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            answer = fcntl.ioctl(probe_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
