"""The figures of a run, computed from its log, and the sentences about a single subject beside its figures."""
