"""Faults, injected on purpose: what `monarch.testing.chaos` gives users. Nothing else imports this folder."""
