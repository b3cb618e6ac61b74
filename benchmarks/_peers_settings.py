"""What had to be chosen for each peer beyond batch, model and optimiser, and why; docs/evidence.md has the list too."""

from __future__ import annotations

SETTINGS: dict[str, dict[str, str]] = {
    "paceline": {
        "micro_batch=128": "what fits into the smallest machine's memory: a share is computed at once",
        "-n 1:4": "how few workers may go on, and how many there may be",
    },
    "ddp": {
        "32 samples per rank": "the batch over the ranks",
    },
    "join": {
        "speeds 1, 1, 1/2, 1/4": "measured or known by the user, who sets them again when they change",
        "the loss times len(y) * ranks / batch": "DDP takes the mean over ranks, not over samples",
        "divide_by_initial_world_size": "left at True: ranks that are done count as zeros",
    },
    "torchrun": {
        "32 samples per rank": "the batch over the ranks",
        "a checkpoint every epoch": "as in the tutorial; more often costs less work done again",
        "--max-restarts=3": "the default is none",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "else the new workers meet the old ones' addresses in the store",
    },
    "torchft": {
        "32 samples per rank": "the batch over the replica groups",
        "--join_timeout_ms 10000": "as in the README; the default is a minute",
        "--min_replicas 1": "as in the README",
        "ProcessGroupGloo timeout 5 s": "as in the example",
        "Manager timeout 30 s": "as in the example",
        "--max-restarts=3": "a replica group is started again by its torchrun",
    },
    "hivemind": {
        "target_batch_size=128": "the job's batch; Hivemind's own examples have thousands",
        "batch_size_per_step=16": "what a peer adds at once",
        "matchmaking_time=0.5": "the default is 15 s, and 3 to 5 s are advised for small local runs",
        "averaging_timeout=10": "as in the quick start",
    },
    "lightning": {
        "32 samples per rank": "the batch over the ranks",
        "num_nodes=4, devices=1": "how the ranks are placed",
    },
    "ray": {
        "32 samples per rank": "the batch over the workers",
        "num_workers=4": "fixed for the run",
        "a checkpoint every epoch": "more often costs less work done again",
        "max_failures=3": "the default is none",
        "RAY_AUTH_TOKEN": "the same on all computers: a head that others join asks for it",
    },
}
