"""The compiler's passes, each a small class `Graph -> Graph`."""
