"""How each op partitions: one line over factors an op."""
