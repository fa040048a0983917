"""Scripts for torchrun on a mesh of processes: `from monarch.spmd import SPMDActor, setup_torch_elastic_env`."""

from __future__ import annotations

from monarch.runtime.actors.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]
