"""Transformers' Trainer on unlike machines: a small GPT-2, randomly initialised, learns Python's own documentation.

    python examples/transformers_gpt.py
    torchrun --nproc-per-node 2 examples/transformers_gpt.py
    paceline run -n 2 --emulate 1,3 examples/transformers_gpt.py
    paceline run -n 1:4 examples/transformers_gpt.py --resume

It is a script for the plain Trainer but for two names, and for `global_batch`, the samples of a step over the whole
fleet. Paragraphs differ in length, and so do the tokens of two micro-batches: they are counted, and the step is the
mean over all label tokens of the global batch, whoever did how many. Nothing is downloaded; tokens are bytes.

Needs pip install 'paceline[transformers]'.
"""

import argparse
import builtins
import inspect
import json
import statistics
import textwrap
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.adapters.transformers import PacelineArguments, PacelineTrainer

LONGEST, END, IGNORED = 160, 0, -100


def paragraphs() -> list[str]:
    """Of the documentation of the built-in types and of a few modules, in a fixed order."""
    modules = [builtins, argparse, inspect, json, statistics, textwrap]
    things = [thing for module in modules for _, thing in sorted(vars(module).items()) if callable(thing)]
    things += [method for kind in (str, bytes, list, dict, set, int, float) for _, method in sorted(vars(kind).items())]
    texts = [text for thing in things for text in (inspect.getdoc(thing) or "").split("\n\n")]
    return list(dict.fromkeys(" ".join(text.split()) for text in texts if len(text) > 40))


def sample(text: str) -> dict[str, list[int]]:
    return {"input_ids": [*text.encode()[: LONGEST - 1], END]}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """To the longest of the batch; padding is not looked at, and its labels do not count."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [END] * (longest - len(row["input_ids"])) for row in rows])
    real = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, IGNORED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("transformers_gpt"))
    parser.add_argument("--samples", type=int, default=10**6, help="paragraphs at most")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    options = parser.parse_args()

    rows = [sample(text) for text in paragraphs()[: options.samples]]
    held_out, train = rows[::10], [row for number, row in enumerate(rows) if number % 10]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LONGEST, n_embd=options.width, n_layer=2, n_head=4, bos_token_id=END,
        eos_token_id=END, pad_token_id=END, loss_type="ForCausalLM",
    )  # fmt: skip
    args = PacelineArguments(
        output_dir=str(options.out),
        global_batch=options.global_batch,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=16,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PacelineTrainer(
        GPT2LMHeadModel(config), args, train_dataset=train, eval_dataset=held_out, data_collator=pad
    )
    trainer.train(resume_from_checkpoint=options.resume and any(options.out.glob("checkpoint-*/paceline.pt")))
    figures = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"held out: {figures['eval_loss']:.3f} a byte after {trainer.state.global_step} steps", flush=True)
        start = torch.tensor([[*b"Return "]], device=args.device)
        ids = trainer.model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=60)[0]
        print(bytes(ids.tolist()).decode(errors="replace").strip("\0"), flush=True)
    trainer.end()


if __name__ == "__main__":
    main()
