"""Per-worker code: computations of each worker on its own, and how values come to it and back."""
