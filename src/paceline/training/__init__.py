"""A script's whole training: joining, its loops, and the evaluations, saves and loads between them."""
