"""Host agents started where a program needs them, rather than attached where they run already.

`launcher` has the interface and what all launchers have in common, `agent` runs `monarch host` in a process that ends
with its parent, `local` and `on_ray` start agents on this machine and on the nodes of a Ray cluster.
"""
