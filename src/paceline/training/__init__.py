"""A script's whole training: joining, its loops, and what is evaluated, saved and loaded between them."""
