"""How processes start and end. `warm` is the parent that forks them, `parent` the controller's side of it, and
`workers` the workers of a mesh on this host."""
