"""The contract of an engine, its kinds (Gloo, NCCL), layers around them (small sums, tree sums), and one in memory."""
