"""Gradients of several batches in one update, and metrics of an evaluation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from blobs import dataloaders, flat, linear, network
from torch.nn.functional import cross_entropy


def training_function(batch_size, accumulate, epochs=3):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    set_seed(42)
    train, test = dataloaders(batch_size)
    model = network().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = linear(optimizer, len(train) * epochs // accumulate)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    accuracy = []
    for epoch in range(epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for x, y in test:
            with torch.no_grad():
                predictions = model(x).argmax(dim=-1)
            predictions, y = accelerator.gather_for_metrics((predictions, y))
            right, count = right + (predictions == y).sum().item(), count + len(y)
        accuracy.append([right, count])
        accelerator.print(f"epoch {epoch}: {right} of {count}")
    found = {"weights": flat(accelerator.unwrap_model(model)), "accuracy": accuracy}
    accelerator.end_training()
    return found
