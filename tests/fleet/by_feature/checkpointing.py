"""Checkpoints every few updates, from which a training goes on in the middle of an epoch."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from blobs import dataloaders, flat, linear, network
from torch.nn.functional import cross_entropy


def training_function(batch_size, folder, every=3, stop_at=None, resume=None, epochs=3):
    accelerator = Accelerator()
    set_seed(42)
    train, test = dataloaders(batch_size)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = linear(optimizer, len(train) * epochs)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    accelerator.register_for_checkpointing(schedule)
    updates, first, skip = 0, 0, 0
    if resume is not None:
        accelerator.load_state(os.path.join(folder, f"step_{resume}"))
        updates = resume
        first, skip = divmod(resume, len(train))
    for epoch in range(first, epochs):
        model.train()
        batches = accelerator.skip_first_batches(train, skip) if skip and epoch == first else train
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates += 1
                if updates % every == 0:
                    accelerator.save_state(os.path.join(folder, f"step_{updates}"))
                if updates == stop_at:
                    accelerator.end_training()
                    return None
    found = {"weights": flat(accelerator.unwrap_model(model)), "updates": updates}
    accelerator.end_training()
    return found
