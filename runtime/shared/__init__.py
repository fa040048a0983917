"""The memory that the processes of a mesh share. Read `futex` and `signals` first (how processes wait for each other),
then `window` (a mesh's memory), `ring` and `wire` (commands), `blocks` (tensors cut into rounds) and `memory` (how much
this machine can give); `checking` finds out whether workers can run a plan, `definitions` sends them ops of the user's
own, and `measured` is the memory for their measurements."""
