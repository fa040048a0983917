"""What two processes share. Read `futex` and `signals` first (how processes wait for each other), then `window` (a
mesh's memory), `ring` and `wire` (commands), `blocks` (tensors cut into rounds) and `memory` (how much this machine can
give)."""
