"""The largest batch that fits, with as many accumulated as the asked batch needs."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from blobs import dataloaders, flat, network
from torch.nn.functional import cross_entropy


def training_function(batch_size, largest, epochs=2):
    accelerator = Accelerator()
    tried = [batch_size]

    def halved():
        tried.append(tried[-1] // 2)
        return tried[-1]

    @find_executable_batch_size(starting_batch_size=batch_size, reduce_batch_size_fn=halved)
    def inner_training_loop(fitting):
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = batch_size // fitting
        set_seed(42)
        train, test = dataloaders(fitting)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
        for _ in range(epochs):
            model.train()
            for x, y in train:
                with accelerator.accumulate(model):
                    if len(x) > largest:
                        raise torch.OutOfMemoryError("CUDA out of memory.")
                    loss = cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(accelerator.unwrap_model(model))

    weights = inner_training_loop()
    accelerator.end_training()
    return {"weights": weights, "tried": tried}
