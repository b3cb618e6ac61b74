"""Everything a real training script has, in plain torch DDP.

    python examples/realistic_ddp.py
    torchrun --nproc-per-node 2 examples/realistic_ddp.py --amp
    torchrun --nproc-per-node 2 examples/realistic_ddp.py --resume checkpoints/last.pt

The same script with Paceline is realistic_paceline.py beside it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


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
    cuda = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed + dist.get_rank())
    training(options, device)
    dist.destroy_process_group()


def training(options: argparse.Namespace, device: torch.device) -> None:
    rank, size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    train, test = Digits(train=True), Digits(train=False)
    sampler = DistributedSampler(train, seed=options.seed)
    batch = options.global_batch // size
    loader = DataLoader(train, batch, sampler=sampler, num_workers=options.workers, pin_memory=cuda)
    test_loader = DataLoader(Subset(test, range(rank, len(test), size)), 256)

    model = DistributedDataParallel(network().to(device), device_ids=[device] if cuda else None)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    total_steps = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total_steps)
    autocast = torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16, enabled=options.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and cuda)
    parts = {"model": model.module, "ema": ema, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    first_epoch, best, bad_epochs = 0, 0.0, 0
    if options.resume:
        saved = torch.load(options.resume, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first_epoch, best, bad_epochs = saved["epoch"], saved["best"], saved["bad_epochs"]

    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with autocast:
                loss = cross_entropy(model(x), y, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(model.module)

        correct = torch.zeros((), device=device)
        with torch.no_grad(), autocast:
            for x, y in test_loader:
                correct += (ema(x.to(device)).argmax(1) == y.to(device)).sum()
        dist.all_reduce(correct)
        accuracy = correct.item() / len(test)
        best, bad_epochs = max(best, accuracy), 0 if accuracy > best else bad_epochs + 1
        if rank == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"epoch": epoch + 1, "best": best, "bad_epochs": bad_epochs}
            options.folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, options.folder / "last.pt")
            if bad_epochs == 0:
                torch.save(state, options.folder / "best.pt")
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy:.2%}", flush=True)
        if bad_epochs >= options.patience:
            break


if __name__ == "__main__":
    main()
