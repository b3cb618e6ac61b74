"""A tiny GPT that learns to write sums and sentences, one character at a time, from lines of unequal length.

    python examples/tiny_gpt.py
    torchrun --nproc-per-node 2 examples/tiny_gpt.py
    paceline run -n 2 --emulate 1,2 examples/tiny_gpt.py

A micro-batch is padded to its longest line, and its loss is a mean over its tokens. Lines differ, so micro-batches
hold different numbers of tokens: `step.backward(loss, weight=tokens)` makes the step the mean over all tokens of the
global batch, whoever did how many of them.
"""

import argparse
import math
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import paceline

NUMBERS = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
RIDERS, DEEDS = ["the old rider", "a tall rider", "our friend", "the last one"], ["pulls", "rests", "climbs", "sings"]
PLACES = ["into the wind", "at the front", "behind the others", "up the long hill", "until evening"]
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz.,"
LINE_END, IGNORED = 0, -100


def lines(count: int, seed: int) -> list[str]:
    """Half sums ("two and three are five."), half sentences of one or two parts."""
    dice = random.Random(seed)

    def line() -> str:
        if dice.random() < 0.5:
            a, b = dice.randrange(7), dice.randrange(7)
            return f"{NUMBERS[a]} and {NUMBERS[b]} are {NUMBERS[a + b]}."
        parts = [f"{dice.choice(RIDERS)} {dice.choice(DEEDS)} {dice.choice(PLACES)}" for _ in range(dice.randint(1, 2))]
        return ", ".join(parts) + "."

    return [line() for _ in range(count)]


def pad(batch: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the tokens to predict: each line between two line ends. Padding is ignored by the loss."""
    rows = [torch.tensor([LINE_END, *map(ALPHABET.index, line), LINE_END]) for line in batch]
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    return tokens, nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before_attention, self.before_mlp = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True)  # looking back only, it never sees the padding
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class TinyGPT(nn.Module):
    """About 110,000 parameters; the output layer shares the embedding's."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, longest: int = 96) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(ALPHABET), width), nn.Embedding(longest, width)
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.body(x) @ self.token.weight.T


@torch.no_grad()
def write(model: nn.Module, device: torch.device, count: int = 6, longest: int = 90) -> list[str]:
    """Lines drawn from the model, a little more sober than it is (temperature 0.7)."""
    tokens = torch.full((count, 1), LINE_END, device=device)
    for _ in range(longest):
        chances = torch.softmax(model(tokens)[:, -1] / 0.7, dim=1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return ["".join(ALPHABET[t] for t in row).strip("\n").split("\n")[0] for row in tokens.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    train = torch.utils.data.DataLoader(lines(options.lines, seed=1), shuffle=True, collate_fn=pad)
    test = torch.utils.data.DataLoader(lines(200, seed=2), batch_size=50, collate_fn=pad)
    batches = {"global_batch": options.global_batch, "micro_batch": options.micro_batch}
    with paceline.join(seed=options.seed) as fleet:
        model = fleet.model(TinyGPT())
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        fleet.track(optimizer=optimizer)

        def sums(tokens: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
            return {"loss": loss, "tokens": (wanted != IGNORED).sum()}

        for step in fleet.steps(train, **batches, epochs=options.epochs):
            warm_up, fall = min(1.0, 20 * step.progress + 0.05), 0.55 + 0.45 * math.cos(math.pi * step.progress)
            optimizer.param_groups[0]["lr"] = options.lr * warm_up * fall
            for tokens, wanted in step:
                part = sums(tokens, wanted)
                step.backward(part["loss"] / part["tokens"], weight=part["tokens"])
            step.commit(optimizer, clip_norm=1.0)
            if step.ends_epoch:
                held_out = fleet.evaluate(sums, test, sums=("loss", "tokens"))
                if fleet.is_leader:
                    nats = held_out["loss"] / held_out["tokens"]
                    print(f"epoch {step.epoch + 1}: loss {step.loss:.3f}, held out {nats:.3f} a character", flush=True)
        if fleet.is_leader:
            print("\n".join(write(model, fleet.device)), flush=True)


if __name__ == "__main__":
    main()
