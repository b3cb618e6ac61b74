"""The job with Hivemind: peers that add gradients to a common batch at their own speed, with nobody in charge."""

import os

import hivemind
import job
import torch
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    address = os.environ["PEERS_ADDRESS"]
    first = os.environ.get("PEERS_FIRST")
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=[first] if first else None, start=True)
    if not first:
        print("first peer:", dht.get_visible_maddrs()[0], flush=True)
    dataset = job.Digits()
    model = job.Network()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="digits",
        optimizer=torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM),
        batch_size_per_step=job.MICRO,
        target_batch_size=job.BATCH,
        matchmaking_time=0.5,
        averaging_timeout=10.0,
    )
    loader = DataLoader(dataset, job.MICRO, shuffle=True, drop_last=True)
    step, counted = optimizer.local_epoch, []
    while step * job.BATCH < job.EPOCHS * len(dataset):
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.append(index)
            if optimizer.local_epoch > step:
                job.commit(model, step * job.BATCH // len(dataset), step, counted)
                step, counted = optimizer.local_epoch, []
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
