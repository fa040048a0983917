"""gRPC reads this when a test first imports it."""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
