"""From a partitioned graph to a plan: the order of a worker's calls, and the places and lifetimes of values."""
