"""One training per fold, with one Accelerator: the folds' predictions of the test set are averaged."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from blobs import TRAIN, dataloaders, flat, network
from torch.nn.functional import cross_entropy


def training_function(batch_size, folds=4, epochs=2):
    accelerator = Accelerator()
    outputs, weights, targets = [], [], []
    for fold in range(folds):
        set_seed(42)
        rows = [row for row in range(TRAIN) if row % folds != fold]
        train, test = dataloaders(batch_size, rows)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
        for _ in range(epochs):
            model.train()
            for x, y in train:
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        found = []
        for x, y in test:
            with torch.no_grad():
                predictions = model(x)
            predictions, y = accelerator.gather_for_metrics((predictions, y))
            found.append(predictions)
            if fold == 0:
                targets.append(y)
        outputs.append(torch.cat(found))
        weights += flat(accelerator.unwrap_model(model))
        model, optimizer, train, test = accelerator.free_memory(model, optimizer, train, test)
    mean = torch.stack(outputs).mean(0)
    right = (mean.argmax(dim=-1) == torch.cat(targets)).sum().item()
    accelerator.end_training()
    return {"weights": weights, "right": right, "count": len(mean)}
