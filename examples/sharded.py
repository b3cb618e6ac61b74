"""A small GPT, divided over the processes of each worker, learns Python's own reference, one character at a time.

    paceline run -n 2 --procs-per-worker 2 examples/sharded.py      # two workers of two processes
    paceline run -n 2 --procs-per-worker 1,2 examples/sharded.py    # one holds the model whole, one divides it
    paceline run -n 2:3 --procs-per-worker 2 examples/sharded.py    # workers come and go, each as a whole
    PACELINE_PROCS_PER_WORKER=2 torchrun --nproc-per-node 4 examples/sharded.py

For models that do not fit one GPU: `shard=True` has torch's `fully_shard` divide parameters, gradients and the
optimiser's state over a worker's processes, and the fleet counts workers. Every process runs this script and makes the
same calls; only the leader, one process of the whole fleet, prints. Nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import paceline

LENGTH, CHARACTERS = 64, 128


def windows(count: int) -> torch.Tensor:
    """Stretches of the reference, as rows of LENGTH characters and the one that follows."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)[:count].clone()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before_attention, self.before_mlp = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.before_mlp(x))))


class CharacterGPT(nn.Module):
    """Its blocks stand in a ModuleList: each is divided by itself, and whole only while it computes."""

    def __init__(self, width: int, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.character(rows) + self.place(torch.arange(rows.shape[1], device=rows.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))  # a row for each character


def memory(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of parameters and optimiser state: in this process, and of the whole model."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    mine = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(part.nbytes for part in mine), sum(whole.numel() * whole.element_size() for whole in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16, help="a worker's: each of its processes takes a part")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    rows = windows(options.samples)
    held_out, train = TensorDataset(rows[::10]), TensorDataset(rows[torch.arange(len(rows)) % 10 > 0])
    with paceline.join() as fleet:
        torch.manual_seed(0)
        model = fleet.model(CharacterGPT(options.width), shard=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # after fleet.model: of this process's parts
        fleet.track(optimizer=optimizer)

        def loss_of(rows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
            return cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten(), reduction=reduction)

        batches = {"global_batch": options.global_batch, "micro_batch": options.micro_batch}
        for step in fleet.steps(train, **batches, epochs=options.epochs):
            for (rows,) in step:
                step.backward(loss_of(rows))
            step.commit(optimizer, clip_norm=1.0)
            if fleet.is_leader and (step.index % 10 == 0 or step.ends_epoch):
                print(f"step {step.index}: loss {step.loss:.3f}", flush=True)

        figures = fleet.evaluate(lambda rows: {"loss": loss_of(rows, "sum")}, held_out, batch_size=32, sums="loss")
        fleet.save("sharded")  # it loads on any grouping
        mine, whole = memory(optimizer)
        parts: list[int] = [0] * fleet.mesh.size()
        distributed.all_gather_object(parts, mine)  # torch's default group is the worker
        if fleet.is_leader:
            print(f"held out: {figures['loss'] / figures['count'] / LENGTH:.3f} a character")
            held = ", ".join(f"{part:,} ({part / whole:.3f})" for part in parts)
            print(f"bytes of parameters and optimiser state: {held} of {whole:,}", flush=True)


if __name__ == "__main__":
    main()
