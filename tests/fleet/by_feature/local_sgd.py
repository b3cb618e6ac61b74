"""Workers that update by themselves, and average their parameters every few updates."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from blobs import dataloaders, network
from torch.nn.functional import cross_entropy


def training_function(batch_size, enabled):
    accelerator = Accelerator()
    train, _ = dataloaders(batch_size)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=enabled) as local_sgd:
        for x, y in train:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    accelerator.end_training()
    return {}
