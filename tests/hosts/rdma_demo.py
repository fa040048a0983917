"""`make demo-rdma`: the training demo on two host agents of this machine, whose workers reach each other by RDMA. Runs
in the virtual machine of `.ci/rdma-vm`, or wherever there is a device."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

AGENT = (str(Path(sys.executable).with_name("monarch")), "host", "--listen", "127.0.0.1:0", "--token-file")


@contextlib.contextmanager
def agent(token: Path) -> Iterator[str]:
    """A host agent; gives its address."""
    process = subprocess.Popen([*AGENT, str(token)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"serving on (\S+)", line):
                threading.Thread(target=sys.stderr.writelines, args=(process.stdout,), daemon=True).start()
                yield found[1]
                return
        sys.exit(f"the host agent has ended:\n{''.join(said)}")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    options = sys.argv[1:] or ["--steps", "3", "--layers", "1", "--width", "64", "--sample", "20"]
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        with agent(token) as first, agent(token) as second:
            where = ["--hosts", f"{first},{second}", "--transports", "verbs", "--timeout", "300"]
            train = ["examples/train_gpt.py", *where, *options]
            print(f"MONARCH_TOKEN={token} python {' '.join(train)}", flush=True)
            # Building kernels takes an emulated machine minutes; which transport joins whom is to be seen.
            switches = {"MONARCH_TOKEN": str(token), "MONARCH_KERNELS": "off", "MONARCH_LOG": "commands"}
            environment = {**os.environ, **switches}
            sys.exit(subprocess.run([sys.executable, *train], env=environment).returncode)


if __name__ == "__main__":
    main()
