"""One training step: the user's loop, the round that sums over the fleet, late workers, and members that change.

Read `steps` (the loop), `step` (one step as the script sees it), `combine` (how a step begins, sums and
commits) and `round` (the two kinds of round), then `training_state` and `step_state` for what is kept, `members` for
workers that come and go, and `late` for rounds with a deadline. `context` holds what they share, `step_state` writes a
round's header and its record too, `step` calls `losses` and `checks`. For a worker's death read `gradients/exchange`,
`gradients/fleet_sums`, then `Elastic.recover`.

- *combine*: a way in which the workers' work is merged; here the mean of gradients in every step.
- *leader*: the worker of rank 0, which plans. *generation*: the members between two changes, numbered.
- *header*: the numbers that each worker reports in a round; summed like the gradients.
- *proxy*: the thread that closes and runs a worker's rounds with a deadline.
- *lap*: a further part of such a step, in which what late workers left is dealt again.
- *floor*: the samples without which a step is not closed; below it the deadline is extended.
"""
