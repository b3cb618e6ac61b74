"""Two networks with two losses, of which the second needs the first one's update."""

import torch
from accelerate import Accelerator
from blobs import FEATURES, dataloaders
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


def training_function(batch_size):
    accelerator = Accelerator()
    train, _ = dataloaders(batch_size)
    generator, critic = nn.Linear(2, FEATURES).double(), nn.Linear(FEATURES, 1).double()
    ones, others = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    generator, critic, ones, others, train = accelerator.prepare(generator, critic, ones, others, train)
    for x, _ in train:
        real, fake = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
        made = generator(torch.randn(len(x), 2).double())
        others.zero_grad()
        loss = binary_cross_entropy_with_logits(critic(x), real) + binary_cross_entropy_with_logits(
            critic(made.detach()), fake
        )
        accelerator.backward(loss)
        others.step()
        ones.zero_grad()
        loss = binary_cross_entropy_with_logits(critic(made), real)
        accelerator.backward(loss)
        ones.step()
    accelerator.end_training()
    return {}
