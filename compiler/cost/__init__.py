"""What calls cost: operations, bytes and seconds, from what a machine can do at most."""
