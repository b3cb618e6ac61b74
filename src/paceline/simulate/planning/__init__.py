"""The planner: how fast the machines, sites and links of a described fleet would train. See docs/spot.md."""
