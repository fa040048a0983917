"""Per-worker code: what each worker computes on its own, and how values come to it and back."""
