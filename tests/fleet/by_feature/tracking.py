"""Figures of each epoch, by a tracker of the script's own on the main process."""

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from blobs import dataloaders, flat, network
from torch.nn.functional import cross_entropy


class Figures(GeneralTracker):
    name = "figures"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.config, self.rows, self.finished = None, [], False

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        self.config = values

    @on_main_process
    def log(self, values, step=None, **_):
        self.rows.append([step, values])

    @on_main_process
    def finish(self):
        self.finished = True


def training_function(batch_size, epochs=3):
    figures = Figures()
    accelerator = Accelerator(log_with=figures)
    set_seed(42)
    train, test = dataloaders(batch_size)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    accelerator.init_trackers("blobs", {"lr": 0.02})
    for epoch in range(epochs):
        model.train()
        for x, y in train:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right, loss = 0, []
        for x, y in test:
            with torch.no_grad():
                outputs = model(x)
            outputs, y = accelerator.gather_for_metrics((outputs, y))
            right += (outputs.argmax(dim=-1) == y).sum().item()
            loss.append(cross_entropy(outputs, y, reduction="none"))
        accelerator.log({"right": right, "loss": torch.cat(loss).mean().item(), "epoch": epoch}, step=epoch)
    rows = accelerator.get_tracker("figures").rows if accelerator.is_main_process else None
    weights = flat(accelerator.unwrap_model(model))
    accelerator.end_training()
    return {"weights": weights, "rows": rows, "config": figures.config, "finished": figures.finished}
