"""Jobs: hosts that a program asks a scheduler for (`monarch.job`)."""
