"""The job with Lightning and its DDP strategy."""

import job
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class Training(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.Network()

    def training_step(self, batch: list, number: int) -> torch.Tensor:
        x, y, _ = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def on_train_batch_end(self, outputs: object, batch: list, number: int) -> None:
        job.commit(self.model, self.current_epoch, self.global_step - 1, batch[2])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=job.LR, momentum=job.MOMENTUM)


def main() -> None:
    dataset = job.Digits()
    loader = DataLoader(dataset, job.BATCH // job.WORKERS, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=job.WORKERS,
        max_epochs=job.EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Training(), loader)


if __name__ == "__main__":
    main()
