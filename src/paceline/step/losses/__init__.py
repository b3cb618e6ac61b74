"""How much a micro-batch's loss counts: what it was divided by, read from autograd's graph."""
