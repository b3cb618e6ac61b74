"""Handwritten digits with Fabric, where the loop is yours: Paceline's steps, Fabric's precision and logger.

    python examples/fabric_digits.py                                        # one process
    torchrun --nproc-per-node 2 examples/fabric_digits.py                   # as before
    paceline run -n 4 --emulate 1,1,2,4 examples/fabric_digits.py           # four unlike machines, emulated

Data and network are those of digits.py beside it.
"""

import argparse

import torch
from digits import datasets, network
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.adapters.lightning import hide_launcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    train, test = datasets()
    torch.manual_seed(0)

    with paceline.join() as fleet:
        hide_launcher()  # Fabric is one process's
        kind = "cpu" if fleet.device.type == "cpu" else "gpu"
        fabric = Fabric(accelerator=kind, devices=1, precision=options.precision, loggers=CSVLogger("fabric"))
        model = fleet.model(network())  # in place of fabric.setup
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        fleet.track(optimizer=optimizer)

        def score(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            with fabric.autocast():
                return {"correct": model(images).argmax(1) == labels}

        loader = DataLoader(train, batch_size=16, shuffle=True)
        for step in fleet.steps(loader, global_batch=128, epochs=options.epochs):
            for images, labels in step:
                with fabric.autocast():
                    loss = nn.functional.cross_entropy(model(images), labels)
                step.backward(loss)  # in place of fabric.backward
            step.commit(optimizer, clip_norm=1.0)  # in place of clip_gradients, step and zero_grad
            if fleet.is_leader:
                fabric.log("loss", step.loss, step.index)
            if step.ends_epoch:
                accuracy = 100 * fleet.evaluate(score, test, batch_size=64)["correct"]
                if fleet.is_leader:
                    print(f"epoch {step.epoch}: loss {step.loss:.4f}, test accuracy {accuracy:.1f}%", flush=True)
        if fleet.is_leader:
            fabric.logger.finalize("success")


if __name__ == "__main__":
    main()
