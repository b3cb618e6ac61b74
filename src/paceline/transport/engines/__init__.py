"""What sums and sends tensors: the contract of an engine, Gloo behind it, and an engine in memory for tests."""
