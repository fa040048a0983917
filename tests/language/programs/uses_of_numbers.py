"""What programs do with numbers: each takes a tensor, an int and a float, and its results tell whether they are those
that it was given."""

from __future__ import annotations

import copy
import decimal
import fractions
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "arithmetic": lambda x, n, f: (x * (n / 4), n + 1, 2 - n, n * 3, n // 2, n % 3, -n, abs(-n), n**2, +n, n + True),
    "reflected": lambda x, n, f: (
        7 - n,
        7 * n,
        7 / (n + 1),
        7 // (n + 1),
        7 % (n + 1),
        2**n,
        0.5**n,
        1.5 - n,
        9.0 / (n + 1),
    ),
    "by itself": lambda x, n, f: (n + n, n * n - n, n / (n + 1), (n + 1) // (n + 1), n % (n + 2), n**n),
    "with floats": lambda x, n, f: (
        x * n * f,
        n + f,
        f / (n + 1),
        n - f,
        f**n,
        n * 0.5,
        0.25 + n,
        n < f,
        f >= n,
        n == f,
    ),
    "compared": lambda x, n, f: x * (2 if n < 3 else 3) + (n == 4) + (n != 2) + (n >= 1.5) + max(n, 2) + min(3.5, n),
    "branches": lambda x, n, f: (x if n % 2 else -x) * (0.5 if n else 2.0) * (1 if 1 <= n <= 4 else 3),
    "no number": lambda x, n, f: x * (n is not None) * (n != "a") * (n not in ("a", None)) * (n != []) * (n == (1,)),
    "tensors of floats": lambda x, n, f: (
        x * n,
        n * x,
        x + n,
        n - x,
        x / (n + 1),
        x**n,
        x > n,
        n <= x,
        x // (n + 1),
        x % (n + 1),
    ),
    "tensors of ints": lambda x, n, f: (
        x.long() * n,
        n + x.long(),
        x.long() // (n + 1),
        x.long() == n,
        x.long() / (n + 1),
    ),
    "ops": lambda x, n, f: (torch.add(x, n), x.add(x, alpha=n), x.clamp(max=n), torch.full((2,), n), x.roll(n, 0)),
    "sizes": lambda x, n, f: (x[: n % 3 + 1], x.narrow(1, 0, n % 3 + 1), torch.zeros(abs(n)), x.repeat(n % 2 + 1, 1)),
    "index": lambda x, n, f: (x * [0.5, 1.0, 2.0][n // 4], "abc"[n % 3], [x, -x][n % 2], list(range(n)), [1] * n),
    "rounded": lambda x, n, f: (round(n), round(n, -1), math.floor(n), math.ceil(n), math.trunc(n), int(n), float(n)),
    "bits": lambda x, n, f: (n & 1, n | 8, n ^ 3, n << 1, n >> 1, ~n, divmod(n, 3), divmod(9, n + 1), n.bit_length()),
    "text": lambda x, n, f: (x, str(n), repr(n), f"{n:03d}", "%d %s" % (n, n), "{}".format(n)),  # noqa: UP031, UP032
    "keys": lambda x, n, f: (x * {1: 2.0, 3: 4.0}.get(n, 1.0), {n: 1}, {n}, hash(n), n in {2, 4}),
    "isinstance": lambda x, n, f: x * (isinstance(n, int) and not isinstance(n, (float, bool))) * isinstance(f, float),
    "type": lambda x, n, f: (x * (2 if type(n) is int else 3), type(n).__name__, n.__class__.__name__, type(f)(1)),
    "type in a table": lambda x, n, f: x * {int: 2.0, float: 3.0}[type(n)] * {float: 5.0}.get(type(f), 7.0),
    "matched": lambda x, n, f: x * _matched(n),
    "JSON": lambda x, n, f: (x, json.dumps({"n": n}), json.dumps([f], default=str)),
    "bytes": lambda x, n, f: (x, len(pickle.dumps(n)), len(pickle.dumps([n, f])), pickle.loads(pickle.dumps(n))),
    "copied": lambda x, n, f: (x * copy.copy(n), copy.deepcopy([n, f]), copy.copy([n])),
    "exact": lambda x, n, f: (x, fractions.Fraction(n, 3), decimal.Decimal(n), n.numerator, n.real, n.imag),
    "NumPy": lambda x, n, f: (x, np.float32(1.5) * n, (np.ones(2, np.float32) * n).dtype.name, np.arange(n).tolist()),
    "NumPy's floats": lambda x, n, f: (x, (np.ones(2, np.float32) * f).dtype.name, type(np.float64(2) * f).__name__),
    "math": lambda x, n, f: (x * math.cos(n) * math.sqrt(f), math.gcd(n, 4), math.factorial(n), math.isclose(n, 3)),
    "caught": lambda x, n, f: x * _caught(n),
    "divided by zero": lambda x, n, f: x * _divided(n),
    "lists": lambda x, n, f: (sum([n, n, 1]), sorted([n, 3, 1.5]), [n, 2].index(n), max([n, 4], key=lambda i: -i)),
}


def _matched(n: Any) -> float:
    match n:
        case 2:
            return 0.5
        case int():
            return 2.0
    return 3.0


def _caught(n: Any) -> float:
    try:
        return float(torch.zeros(n, 2).numel() + torch.tensor(n).item())
    except (TypeError, RuntimeError):
        return -1.0


def _divided(n: Any) -> float:
    try:
        return 6 / (n - 3) + 6 // (n - 4) + 6 % (n - 5)
    except ZeroDivisionError:
        return -1.0
