"""From a partitioned graph to a plan: in which order a worker runs its calls, where values lie, and how long."""
