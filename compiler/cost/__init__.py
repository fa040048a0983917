"""The costs of calls: operations, bytes and seconds, from a machine's peak rates."""
