"""A GAN: two models, two optimisers and a loss each, on whatever machines there are. It learns points on a circle.

    python examples/gan.py                                           # one process, a few seconds
    paceline run -n 4 --emulate 1,1,2,4 examples/gan.py              # four unlike machines, emulated
    paceline run -n 2 examples/gan.py --by-turns                     # the players train in steps by turns

Together: both have their backward in every step, at the same weights. By turns: every second step is the
discriminator's, and the generator then meets it as it has become. See docs/sharding.md.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import paceline

NOISE = 4


def circle(samples: int = 4096) -> TensorDataset:
    """Points near the unit circle."""
    numbers = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(samples, generator=numbers)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(samples, 2, generator=numbers))


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Real points are to be judged high, made ones low. ``detach``: the generator is not to help with that."""
    return softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    return softplus(-discriminator(fake)).mean()


def distance(generator: nn.Module, device: torch.device) -> float:
    """How far the made points lie from the circle, on average."""
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        return (generator(noise).norm(dim=1) - 1).abs().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--by-turns", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    with paceline.join() as fleet:
        generator, discriminator = fleet.model(network(NOISE, 2)), fleet.model(network(2, 1))
        opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        fleet.track(opt_g=opt_g, opt_d=opt_d)
        steps = fleet.steps(
            circle(), global_batch=options.global_batch, micro_batch=options.micro_batch, epochs=options.epochs
        )
        for step in steps:
            trains_d = not options.by_turns or step.index % 2 == 0
            trains_g = not options.by_turns or step.index % 2 == 1
            for (real,) in step:
                fake = generator(torch.randn(len(real), NOISE, device=fleet.device))
                if trains_d:
                    step.backward(discriminator_loss(discriminator, real, fake), models=discriminator)
                if trains_g:
                    step.backward(generator_loss(discriminator, fake), models=generator)
            step.commit(*[opt_d] * trains_d, *[opt_g] * trains_g)
            if step.ends_epoch and fleet.is_leader:
                print(f"epoch {step.epoch + 1}: distance {distance(generator, fleet.device):.3f}", flush=True)


if __name__ == "__main__":
    main()
