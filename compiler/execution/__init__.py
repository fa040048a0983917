"""How plans come to be run: the Protocol that the runtime implements, the factories of workers, and the subscribers to
events."""
