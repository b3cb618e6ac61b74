"""Handwritten digits with Accelerate's own loop: beside a script for Accelerate, one import differs.

    python examples/accelerate_digits.py                                        # one process
    accelerate launch examples/accelerate_digits.py                             # as before
    paceline run -n 4 --emulate 1,1,2,4 examples/accelerate_digits.py           # four unlike machines, emulated
    paceline run -n 3 examples/accelerate_digits.py --resume state/epoch_1      # go on, with another number of them

The data and the network are those of digits.py beside it.
"""

import argparse

import torch
from accelerate.utils import set_seed
from digits import datasets, network
from torch import nn
from torch.utils.data import DataLoader

from paceline.adapters.accelerate import Accelerator  # was: from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="samples per process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--save", help="folder for a checkpoint per epoch")
    parser.add_argument("--resume", help="a checkpoint's folder, whose name ends with the epochs done")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, mixed_precision=options.precision)
    set_seed(42)
    train, test = datasets()
    train_loader = DataLoader(train, batch_size=options.batch, shuffle=True)
    test_loader = DataLoader(test, batch_size=64)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=options.epochs * len(train_loader) // options.accumulate
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    first = 0
    if options.resume:
        accelerator.load_state(options.resume)
        first = int(options.resume.rpartition("_")[2])

    for epoch in range(first, options.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct, count = 0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                predicted = model(images).argmax(1)
            predicted, labels = accelerator.gather_for_metrics((predicted, labels))
            correct += int((predicted == labels).sum())
            count += len(labels)
        accelerator.print(f"epoch {epoch}: test accuracy {100 * correct / count:.1f}% of {count}", flush=True)
        if options.save:
            accelerator.save_state(f"{options.save}/epoch_{epoch + 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
