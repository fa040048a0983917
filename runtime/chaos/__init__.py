"""Faults, injected on purpose: the code of `monarch.testing.chaos`. Nothing else imports this folder."""
