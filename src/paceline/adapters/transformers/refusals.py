"""Settings of the Trainer that a fleet cannot honour: each is refused in a sentence that states what to write."""

from __future__ import annotations

import os
from typing import Any

INSTEAD = "Paceline combines the gradients of the whole fleet itself"

UNSET: dict[str, str] = {
    "deepspeed": f"{INSTEAD}: leave deepspeed out",
    "fsdp": f"{INSTEAD}, and every worker holds the whole model: leave fsdp out",
    "fsdp_config": f"{INSTEAD}, and every worker holds the whole model: leave fsdp_config out",
    "parallelism_config": f"{INSTEAD}, and every worker holds the whole model: leave parallelism_config out",
    "ddp_find_unused_parameters": f"{INSTEAD}, and unused parameters need no setting: leave it out",
    "ddp_bucket_cap_mb": f"{INSTEAD}: leave it out",
    "ddp_broadcast_buffers": f"{INSTEAD}: leave it out",
    "ddp_static_graph": f"{INSTEAD}: leave it out",
    "ddp_backend": f"{INSTEAD}, over the network that it finds: leave it out",
    "fp16": "its loss scale is Accelerate's: use bf16=True, or float32",
    "fp16_full_eval": "it would turn the fleet's model into float16: leave it out",
    "bf16_full_eval": "it would turn the fleet's model into bfloat16: use bf16=True, which evaluates in bfloat16 too",
    "auto_find_batch_size": 'it begins the training anew: use micro_batch="auto"',
    "torch_empty_cache_steps": "micro-batches are Paceline's: leave it out",
    "batch_eval_metrics": "batches are evaluated by unlike workers: leave it out; compute_metrics gets all predictions",
    "enable_jit_checkpoint": "a worker that gets SIGTERM leaves after its step, and the others go on: leave it out",
    "save_on_each_node": "the leader writes, and hands what it reads to the others: leave it out",
    "ignore_data_skip": "a resumed training goes on where its data stood: leave it out",
    "use_liger_kernel": "it replaces the model after Paceline has taken it in: apply it to the model before",
}
"""Settings, by name, that must have the Trainer's default, and what to write instead."""
ACCELERATOR = ("split_batches", "dispatch_batches", "use_configured_state", "gradient_accumulation_kwargs")
IN_BACKWARD = ("lomo", "adalomo")
"""Optimisers that update while backward runs, before the fleet has combined anything."""


def check_settings(args: Any) -> None:
    """Raise ValueError for the first setting that cannot be honoured."""
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a step has global_batch samples, and "
            "each worker accumulates its share of them; leave it at 1 and set global_batch"
        )
    for name, advice in UNSET.items():
        given = getattr(args, name, None)
        if given or (given is not None and name.startswith("ddp_")):  # of these, False is a setting too
            raise ValueError(f"{name}={given!r} does not go with PacelineTrainer: {advice}")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "load_best_model_at_end with save_only_model: every worker gets the best weights from the leader's "
            "checkpoint, which save_only_model leaves out; give one of them"
        )
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' draws one worker's part, and Paceline deals the parts: use "
            "'random', 'sequential' or 'group_by_length'"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in IN_BACKWARD or optim.endswith("layerwise"):
        raise ValueError(f"optim={optim!r} updates while backward runs, before the fleet has combined: use another")
    _check_accelerator(args.accelerator_config)


def _check_accelerator(config: Any) -> None:
    given = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
    for name in ACCELERATOR:
        if given.get(name):
            raise ValueError(f"accelerator_config's {name} does not go with PacelineTrainer, which deals the batches")


def check_environment() -> None:
    """Raise ValueError where ``accelerate launch`` asked for an engine of its own."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"ACCELERATE_USE_{name} is set, and {INSTEAD}: start the script by paceline run or torchrun, not by "
                "accelerate launch"
            )
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        raise ValueError(f"ACCELERATE_MIXED_PRECISION=fp16: {UNSET['fp16']}")


def check_dataset(dataset: Any) -> None:
    """Raise ValueError for a dataset without a length, such as a stream."""
    if dataset is None:
        raise ValueError("PacelineTrainer.train needs a train_dataset")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"{type(dataset).__name__} has no length: PacelineTrainer deals every sample of an epoch once; give a "
            "dataset with __len__ and __getitem__, or write the loop over fleet.steps, which takes streams"
        )
