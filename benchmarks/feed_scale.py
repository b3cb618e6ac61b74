"""A billion samples: how long an epoch takes to open, how large its state is, how fast indices are dealt.

No data is read. The last line printed is one JSON object: open_ms (median), state_bytes (the largest JSON form seen
while dealing) and indices_per_s (deal, consume and map to dataset indices, all workers' shares of a step together).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time

from _smoke import smoke

from paceline.feed import Feed

LENGTH, WORKERS, SHARE, AHEAD, STEPS = 10**9, 16, 256, 1024, 200
LIMITS = {"open_ms": 50.0, "state_bytes": 1_000_000, "indices_per_s": 1_000_000.0}
globals().update(smoke(STEPS=3, LIMITS={"open_ms": math.inf, "state_bytes": math.inf, "indices_per_s": 0.0}))


def open_ms(repeats: int = 21) -> float:
    """Median milliseconds from nothing to an epoch ready to be dealt."""
    taken = []
    for epoch in range(repeats):
        started = time.perf_counter()
        feed = Feed(LENGTH, workers=WORKERS)
        feed.open(epoch)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def deal_steps(feed: Feed) -> tuple[float, int]:
    """Indices per second over many steps with uneven shares, and the largest state in bytes."""
    shares = [SHARE // 2 + SHARE * worker // (WORKERS - 1) for worker in range(WORKERS)]
    dealt, seconds, largest = 0, 0.0, 0
    for _ in range(STEPS):
        started = time.perf_counter()
        counts = feed.deal(shares, ahead=AHEAD)
        for ranges in feed.consume(counts):
            dealt += len(feed.indices(ranges))
        seconds += time.perf_counter() - started
        largest = max(largest, len(json.dumps(feed.state_dict())))
    return dealt / seconds, largest


def main() -> int:
    indices_per_s, state_bytes = deal_steps(Feed(LENGTH, workers=WORKERS))
    figures = {
        "open_ms": round(open_ms(), 3),
        "state_bytes": state_bytes,
        "indices_per_s": round(indices_per_s),
    }
    print(f"{LENGTH:,} samples, {WORKERS} workers, micro-batches of about {SHARE}, {STEPS} steps")
    print(f"{'figure':<15}{'measured':>14}{'limit':>14}")
    print(f"{'open_ms':<15}{figures['open_ms']:>14,.3f}{'<= 50':>14}")
    print(f"{'state_bytes':<15}{figures['state_bytes']:>14,}{'<= 1,000,000':>14}")
    print(f"{'indices_per_s':<15}{figures['indices_per_s']:>14,}{'>= 1,000,000':>14}")
    print(json.dumps(figures))
    met = (
        figures["open_ms"] <= LIMITS["open_ms"]
        and state_bytes <= LIMITS["state_bytes"]
        and indices_per_s >= LIMITS["indices_per_s"]
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
