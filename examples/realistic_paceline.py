"""Everything a real training script has, with Paceline.

    python examples/realistic_paceline.py
    torchrun --nproc-per-node 2 examples/realistic_paceline.py --amp
    paceline run -n 4 --emulate 1,1,2,4 examples/realistic_paceline.py --micro-batch 8

The plain DDP script it was ported from is realistic_ddp.py beside it; docs/porting.md explains the difference.
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import paceline


class Digits(Dataset):
    """Handwritten digits; those to train on are shifted by up to a pixel and get noise, anew each time."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        self.chosen = order[:1437] if train else order[1437:]
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        self.train = train

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.images[self.chosen[index]], self.labels[self.chosen[index]]
        if self.train:
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2)) + 0.1 * torch.randn(1, 8, 8)
        return image, label


def network() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--amp", action="store_true", help="fp16 with a loss scale on GPUs, bf16 on CPUs")
    parser.add_argument("--workers", type=int, default=1, help="loader processes")
    parser.add_argument("--patience", type=int, default=4, help="stop after so many epochs without a better accuracy")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    with paceline.join(seed=options.seed) as fleet:
        training(options, fleet)


def training(options: argparse.Namespace, fleet: paceline.Fleet) -> None:
    device, cuda = fleet.device, fleet.device.type == "cuda"
    train, test = Digits(train=True), Digits(train=False)
    loader = DataLoader(train, options.micro_batch, shuffle=True, num_workers=options.workers, pin_memory=cuda)
    test_loader = DataLoader(test, 256)

    model = fleet.model(network())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    total_steps = options.epochs * math.ceil(len(train) / options.global_batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total_steps)
    autocast = torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16, enabled=options.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and cuda)
    fleet.track(ema=ema, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

    fleet.state.best, fleet.state.bad_epochs = 0.0, 0
    if options.resume:
        fleet.load(options.resume)

    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        with autocast:
            return {"correct": ema(x).argmax(1) == y}

    for step in fleet.steps(loader, global_batch=options.global_batch, epochs=options.epochs):
        for x, y in step:
            with autocast:
                loss = cross_entropy(model(x), y, label_smoothing=0.1)
            step.backward(loss)
        step.commit(optimizer, clip_norm=5.0)
        scheduler.step()
        ema.update_parameters(model)
        if not step.ends_epoch:
            continue

        accuracy = fleet.evaluate(score, test_loader)["correct"]
        fleet.state.bad_epochs = 0 if accuracy > fleet.state.best else fleet.state.bad_epochs + 1
        fleet.state.best = max(fleet.state.best, accuracy)
        fleet.save(options.folder / "last.pt")
        if fleet.state.bad_epochs == 0:
            fleet.save(options.folder / "best.pt")
        if fleet.is_leader:
            print(f"epoch {step.epoch + 1}: loss {step.loss:.4f}, test accuracy {accuracy:.2%}", flush=True)
        if fleet.state.bad_epochs >= options.patience:
            break


if __name__ == "__main__":
    main()
