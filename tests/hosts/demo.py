"""`make demo-hosts`: the training demo on two hosts of this machine's own making, network namespaces joined by a cable,
with TLS between them. Needs root; what it makes is gone when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts.cluster import cluster
from tests.hosts.network import network, why_not


def main() -> None:
    if reason := why_not():
        sys.exit(f"make demo-hosts: {reason}")
    with tempfile.TemporaryDirectory() as folder, network(2) as made, cluster(made, Path(folder)) as two:
        command = [sys.executable, "examples/train_gpt.py", "--hosts", ",".join(two.addresses), *sys.argv[1:]]
        print(f"MONARCH_TLS={two.tls} python {' '.join(command[1:])}", flush=True)
        sys.exit(subprocess.run(command, env={**os.environ, "MONARCH_TLS": str(two.tls)}).returncode)


if __name__ == "__main__":
    main()
