"""Plans: everything that a worker needs to run a program, and the Protocol by which programs are run."""

from monarch.compiler.plan.executor import Executor, Handle, executor_for, set_executor_factory
from monarch.compiler.plan.plan import Instruction, Plan, Slot, ValueSpec

__all__ = ["Executor", "Handle", "Instruction", "Plan", "Slot", "ValueSpec", "executor_for", "set_executor_factory"]
