"""Settings of the process that only functions show, such as `torch.get_num_threads()` or the context of `decimal`.

Code that names what reads a setting is checked against it at each call. What a program sets, each call sets anew.
"""

from __future__ import annotations

import abc
import decimal
import gc
import locale
import sys
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution

from monarch.language.programs.held import Contents, Held


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting: how it is read, as a plain value, and set; code that names one of `names`, or a module of that name,
    may depend on it."""

    names: frozenset[str]
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None = None


class Set(Held):
    """A setting, and its value."""

    @classmethod
    def read(cls, holder: Setting) -> Contents:
        return ["()"], [holder.get()]

    @classmethod
    def put(cls, holder: Setting, key: Any, value: Any) -> None:
        if holder.put is not None:
            holder.put(value)

    def changed(self) -> Contents | None:
        now = self.read(self.holder)
        return None if now == self.before else now


def _decimal() -> str:
    # Flags say what has happened, and are no setting.
    *kept, _, traps = decimal.getcontext().__reduce__()[1]
    return repr((*kept, sorted(each.__name__ for each in traps)))


def _set_decimal(value: str) -> None:
    *kept, traps = literal_eval(value)
    context = decimal.getcontext()
    for name, entry in zip(("prec", "rounding", "Emin", "Emax", "capitals", "clamp"), kept, strict=True):
        setattr(context, name, entry)
    for signal in context.traps:
        context.traps[signal] = signal.__name__ in traps


def _autocast() -> str:
    return f"{torch.get_autocast_dtype('cpu')} {torch.get_autocast_dtype('cuda')}"


def _set_autocast(value: str) -> None:
    for device, dtype in zip(("cpu", "cuda"), value.split(), strict=True):
        torch.set_autocast_dtype(device, getattr(torch, dtype.removeprefix("torch.")))


def _set_dtype(value: str) -> None:
    torch.set_default_dtype(getattr(torch, value.removeprefix("torch.")))


def _set_collector(value: str) -> None:
    runs, thresholds = literal_eval(value)
    (gc.enable if runs else gc.disable)()
    gc.set_threshold(*thresholds)


def _matmul(name: str) -> Setting:
    """A flag of `torch.backends.cuda.matmul`, an object whose attributes are all computed."""
    get = getattr(torch._C, f"_get_cublas_{name}")
    return Setting(
        frozenset((name,)),
        lambda: repr(get()),
        lambda value: setattr(torch.backends.cuda.matmul, name, literal_eval(value)),
    )


def _of(module: Any, get: str, put: str | None = None, *others: str) -> Setting:
    return Setting(frozenset((get, *others)), getattr(module, get), None if put is None else getattr(module, put))


DECIMAL = Setting(frozenset(("decimal", "Decimal")), _decimal, _set_decimal)
COLLECTOR = Setting(frozenset(("gc",)), lambda: repr((gc.isenabled(), gc.get_threshold())), _set_collector)
"""Python's garbage collector, whose settings are others while a program is traced, unless its code looks at them."""
SETTINGS = (
    DECIMAL,
    Setting(
        frozenset(("locale",)),
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    Setting(frozenset(("isinstance", "issubclass")), abc.get_cache_token),  # classes that were registered with another
    Setting(frozenset(("numpy",)), lambda: repr(np.geterr()), lambda value: np.seterr(**literal_eval(value))),
    Setting(frozenset(("getbufsize",)), np.getbufsize, np.setbufsize),
    Setting(
        frozenset(("get_printoptions", "array2string", "array_str", "array_repr")),
        lambda: repr(np.get_printoptions()),
    ),
    Setting(
        frozenset(("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype")), _autocast, _set_autocast
    ),
    Setting(
        frozenset(("get_default_dtype", "set_default_dtype", "set_default_tensor_type")),
        lambda: str(torch.get_default_dtype()),
        _set_dtype,
    ),
    Setting(
        frozenset(("is_anomaly_enabled", "is_anomaly_check_nan_enabled")),
        lambda: f"{torch.is_anomaly_enabled()} {torch.is_anomaly_check_nan_enabled()}",
    ),
    *map(
        _matmul,
        (
            "allow_tf32",
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        ),
    ),
    Setting(frozenset(("PRINT_OPTS", "set_printoptions")), lambda: repr(torch._tensor_str.PRINT_OPTS)),
    Setting(frozenset(("get_default_device",)), lambda: str(torch.get_default_device())),
    _of(torch, "get_num_threads", "set_num_threads"),
    _of(torch, "get_num_interop_threads"),
    _of(torch, "get_float32_matmul_precision", "set_float32_matmul_precision"),
    _of(torch, "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    Setting(
        frozenset(("is_deterministic_algorithms_warn_only_enabled", "use_deterministic_algorithms")),
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda value: torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value),
    ),
    _of(torch, "is_warn_always_enabled", "set_warn_always"),
    _of(torch.__future__, "get_swap_module_params_on_conversion", "set_swap_module_params_on_conversion"),
    _of(torch.__future__, "get_overwrite_module_params_on_conversion", "set_overwrite_module_params_on_conversion"),
    _of(torch, "is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    _of(torch.backends.mha, "get_fastpath_enabled", "set_fastpath_enabled"),
    *(
        _of(torch.backends.cuda, f"{name}_sdp_enabled", f"enable_{name}_sdp")
        for name in ("flash", "math", "mem_efficient", "cudnn")
    ),
    _of(torch.multiprocessing, "get_sharing_strategy", "set_sharing_strategy"),
    _of(torch.hub, "get_dir", "set_dir"),
    Setting(
        frozenset(("check_sparse_tensor_invariants",)),
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        lambda value: torch._C._set_check_sparse_tensor_invariants(value),
    ),
    Setting(
        frozenset(("distributions", "set_default_validate_args", *torch.distributions.__all__)),
        lambda: Distribution._validate_args,
        Distribution.set_default_validate_args,
    ),
    _of(sys, "getrecursionlimit", "setrecursionlimit"),
    _of(sys, "getswitchinterval", "setswitchinterval"),
    _of(sys, "get_int_max_str_digits", "set_int_max_str_digits"),
)
