"""For tests of programs that use Monarch: `from monarch.testing import chaos` injects faults."""
