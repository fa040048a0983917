"""A worker. `bindings`, `arena` and `frame` make a plan a Python function, `graphs` records its parts as CUDA graphs,
`device` runs its kernels;
`state` decides what a command does, `loop` reads commands; `exchange` lends tensors to actors of the same process,
`peers` finds the counterparts on other hosts, and `tracing` notes when each instruction ran."""
