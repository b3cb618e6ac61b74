"""A plan for any fleet: what its machines, sites and links would make of a training. See docs/plan.md."""
