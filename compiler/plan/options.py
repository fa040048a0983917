"""How a program is compiled: the options of `@monarch.program`, as one value from the program to its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monarch.compiler.errors import MonarchError, did_you_mean
from monarch.compiler.sizes import parse_bytes

TARGETS: dict[str, str] = {
    "cpu": "workers on CPU cores",
    "cuda:80": "NVIDIA A100 (compute capability 8.0)",
    "cuda:90": "NVIDIA H100 and H200 (compute capability 9.0)",
    "cuda:100": "NVIDIA B200 (compute capability 10.0)",
    "gfx942": "AMD Instinct MI300",
}
"""What a plan can be compiled for."""

BACKENDS: dict[str, str] = {
    "monarch": "the mesh's own memory, and one-sided transports between hosts",
    "gloo": "process groups of torch.distributed with Gloo, for CPUs",
    "nccl": "process groups of torch.distributed with NCCL, for GPUs, one for each worker",
}
"""What can move tensors between the workers of a plan."""

ROUNDINGS: dict[str, str] = {"eager": "after every op", "chain": "once a kernel"}
"""When values in bf16 and f16 are rounded in generated kernels."""


ANOMALIES = ("", "nan", "inf")
DEFAULT_DTYPES = ("f32", "f64", "bf16", "f16")


@dataclass(frozen=True)
class CompileOptions:
    """How a program is compiled. Programs, traced graphs, the passes and plans carry one such value.

    `target`        what the workers run the plan on: "cpu", "cuda:90" (see TARGETS)
    `memory_limit`  the most bytes that a worker may hold at once, inputs and state included: values are computed again,
                    rather than kept, until the plan stays within it. None for any number.
    `rounding`      "eager" (every op's result in bf16 or f16 is rounded, as PyTorch does) or "chain" (only what a
                    kernel stores is)
    `collectives`   what moves tensors between workers: "monarch", "gloo" or "nccl" (see BACKENDS)
    `cuda_graphs`   whether workers record what they launch as CUDA graphs (see `stretches`)
    `strict`        whether an op without a sharding rule that reads something sharded is a RuleError, rather than run
                    whole on every worker
    `dtype`         PyTorch's default dtype ("f32", or what `torch.set_default_dtype` was told) where the program was
                    compiled: what ops make of whole numbers on the workers too. No option of a program's own
    `kernels`       which ops become generated kernels: "auto" (those of a program in which that saves enough time),
                    "all" that can, or "off". None for what the setting `kernels` says.

    `redundancy`    1 where the program's state is to survive any single loss of a worker or a host: another worker
                    keeps copies of what the layouts replicate nowhere else (`survival.copies_for`)
    `layouts`       "auto" where the layouts that nobody has said are searched for, those of parameters, inputs and
                    activations (`search.door`); "" where they are as they are
    `machine`       the machine on which these layouts are cheapest: one that ships, or a file (`cost.cluster`). "" for
                    one host of the target's
    `anomaly`       what the workers look for in every value: "" (nothing), "nan", or "inf" (both); the step fails at
                    the first (`Mesh.detect_anomaly`). Goes with kernels="off"

    Raises MonarchError for a value that an option does not have. Whether the options go together `check` says, because
    a program's target can still be replaced (`monarchc compile --target`).
    """

    target: str = "cpu"
    memory_limit: int | None = None
    rounding: str = "eager"
    collectives: str = "monarch"
    cuda_graphs: bool = False
    strict: bool = False
    dtype: str = "f32"
    kernels: str | None = None
    redundancy: int = 0
    layouts: str = ""
    machine: str = ""
    anomaly: str = ""

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            known = " or ".join(f"{name!r} ({what})" for name, what in ROUNDINGS.items())
            raise MonarchError(f"rounding={self.rounding!r}", hint=f"it is {known}.")
        check_target(self.target)
        check_backend(self.collectives)
        for key in ("cuda_graphs", "strict"):
            if type(value := getattr(self, key)) is not bool:
                raise MonarchError(f"{key}={str(value)[:60]!r}", hint="it is True or False.")
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit, "memory_limit")
        if self.kernels not in (None, "auto", "all", "off"):
            raise MonarchError(f"kernels={self.kernels!r}", hint="it is 'auto', 'all' or 'off'.")
        if type(self.redundancy) is not int or self.redundancy not in (0, 1):
            raise MonarchError(f"redundancy={str(self.redundancy)[:60]!r}", hint="it is 0, or 1 for any single loss.")
        if self.layouts not in ("", "auto"):
            raise MonarchError(
                f"layouts={str(self.layouts)[:60]!r}",
                hint="it is 'auto'. Layouts of your own go to module_to_mesh(model, mesh, layouts) for parameters,\n"
                "and to annotations for arguments.",
            )
        if not isinstance(self.machine, str):
            raise MonarchError(
                f"machine={str(self.machine)[:60]!r}", hint="it is a name, 'h100-8', or a file, 'mine.toml'."
            )
        if self.machine and not self.layouts:
            raise MonarchError(
                f"machine={self.machine!r} names the machine for a search of layouts, and the program searches none",
                hint="pass layouts='auto' too, or leave it out.",
            )
        if self.anomaly not in ANOMALIES:
            raise MonarchError(f"anomaly={self.anomaly!r}", hint="it is '', 'nan' or 'inf'.")

    def looking_for(self, anomaly: str) -> CompileOptions:
        """These options for a program whose workers look for anomalies op by op: what is computed again, or recorded,
        or stays within a kernel would not be seen."""
        if not anomaly:
            return self
        return replace(self, anomaly=anomaly, kernels="off", memory_limit=None, cuda_graphs=False)

    def check(self) -> None:
        """Raise MonarchError where the target's workers cannot do what another option asks of them."""
        check_backend(self.collectives, self.target)
        if self.cuda_graphs and not self.target.startswith("cuda:"):
            raise MonarchError(
                f"cuda_graphs=True is for GPUs of NVIDIA's, and the plan is for {self.target}",
                hint="leave it out, or say which GPU: @monarch.program(target='cuda:90', cuda_graphs=True).",
            )


def check_target(target: object) -> None:
    """Raise MonarchError, which lists the known targets, for an unknown one."""
    if target in TARGETS:
        return
    known = "\n".join(f"{name:<9} {what}" for name, what in TARGETS.items())
    hint = f"{did_you_mean(str(target), TARGETS)}Targets are\n{known}"
    raise MonarchError(f"unknown target {str(target)[:60]!r}", hint=hint)


def check_backend(collectives: object, target: str | None = None) -> None:
    """Raise MonarchError for an unknown backend, or one that cannot move the tensors of a target's workers."""
    if collectives not in BACKENDS:
        known = "\n".join(f"{name:<9} {what}" for name, what in BACKENDS.items())
        hint = f"{did_you_mean(str(collectives), BACKENDS)}There are\n{known}"
        raise MonarchError(f"unknown collectives {str(collectives)[:60]!r}", hint=hint)
    if target is None:
        return
    on_cpu = target == "cpu"
    if collectives == ("nccl" if on_cpu else "gloo"):
        where, other = ("CPUs", "gloo") if on_cpu else ("GPUs", "nccl")
        raise MonarchError(
            f"collectives='{collectives}' does not move tensors of {where}, and the plan is for {target}",
            hint=f"collectives='{other}' does, and so does 'monarch', which is what there is without it.",
        )
