"""Arguments for a module's forward pass, made up from the module: only their shapes and dtypes count."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monarch.compiler.types import TensorType

Inputs = Sequence[Any] | Mapping[str, Any]


def made_up(module: nn.Module) -> Iterator[Inputs]:
    """The possible inputs of the module's forward pass, the likeliest first; floats have the dtype of its parameters.

    For a model of `transformers`: by its config, all kinds of input that its forward pass has (tokens and images, say),
    and then the main one alone. For another module whose forward pass needs one argument: a batch of 2 that a layer
    of each kind takes, in the order of its layers.
    """
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.get_default_dtype())

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    for inputs in _kinds(module):
        yield {k: cast(x) for k, x in inputs.items()} if isinstance(inputs, Mapping) else [cast(x) for x in inputs]


def _kinds(module: nn.Module) -> Iterator[Inputs]:
    config = getattr(module, "config", None)
    if config is not None and hasattr(module, "main_input_name"):
        yield from _of_transformers(module, config)
    elif len(_needed(module)) < 2:
        seen: dict[str, torch.Tensor] = {}
        for layer in module.modules():
            if (found := _of_layer(layer)) is not None:
                seen.setdefault(*found)
        if "features" in seen:  # without a dim of time, as BatchNorm1d behind the layer wants them
            seen["rows"] = seen["features"][:, 0]
        yield from ((tensor,) for tensor in seen.values())


def asked_for(module: nn.Module) -> str:
    """How to write the arguments of its forward pass where these are needed: `inputs={"text": text, …}`."""
    names = _needed(module)
    if hasattr(module, "main_input_name"):
        taken = inspect.signature(module.forward).parameters
        names = [name for name in taken if name in (*names, module.main_input_name, *_KINDS)]
    if len(names) < 2:
        return f"inputs=({', '.join(names) or 'tokens'},)"
    return f"inputs={{{', '.join(f'{name!r}: {name}' for name in names)}}}".replace("'", '"')


def described(inputs: Inputs) -> str:
    """`input_ids=i64[2, 4]`."""

    def text(value: Any) -> str:
        is_tensor = isinstance(value, torch.Tensor)
        return str(TensorType(value.dtype, tuple(value.shape))) if is_tensor else repr(value)

    if isinstance(inputs, Mapping):
        return ", ".join(f"{name}={text(value)}" for name, value in inputs.items())
    return ", ".join(map(text, inputs))


def _needed(module: nn.Module) -> list[str]:
    """The names of the arguments that its forward pass needs."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _of_layer(layer: nn.Module) -> tuple[str, torch.Tensor] | None:
    """The kind of a layer, and its input."""
    if isinstance(layer, nn.Embedding):
        return "tokens", torch.zeros(2, 4, dtype=torch.int64)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return "images", torch.zeros(2, layer.in_channels, *[32] * len(layer.kernel_size))
    if isinstance(layer, nn.Linear):
        return "features", torch.zeros(2, 4, layer.in_features)
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return "normed", torch.zeros(2, 4, *layer.normalized_shape)
    if isinstance(layer, nn.RNNBase):
        return "steps", torch.zeros(2, 4, layer.input_size)
    return None


_KINDS = ("input_ids", "pixel_values", "input_features", "input_values", "past_values")
"""The kinds of input that models of `transformers` have, by the names of the arguments."""


def _of_transformers(module: Any, config: Any) -> Iterator[dict[str, torch.Tensor]]:
    main, taken = module.main_input_name, inspect.signature(module.forward).parameters
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    decoder = {"decoder_input_ids": tokens} if config.is_encoder_decoder and "decoder_input_ids" in taken else {}
    found = {}
    for name in dict.fromkeys([main, *(kind for kind in _KINDS if kind in taken)]):
        if (tensor := _of_kind(name, config)) is not None:
            found[name] = tensor
    if len(found) > 1:
        yield found | decoder
    if main in found:
        yield {main: found[main], **decoder}


def _of_kind(name: str, config: Any) -> torch.Tensor | None:
    """None where neither the config nor those of its parts say the size."""

    def said(*names: str) -> tuple[Any, ...] | None:
        parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ()))]
        found = tuple(next((getattr(part, name) for part in parts if hasattr(part, name)), None) for name in names)
        return None if None in found else found

    match name:
        case "pixel_values" if sizes := said("num_channels"):
            size = (said("image_size") or (64,))[0]
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            return torch.zeros(2, *sizes, height, width)
        case "input_features" if sizes := said("num_mel_bins", "max_source_positions"):
            return torch.zeros(2, sizes[0], 2 * sizes[1])
        case "input_values" if sizes := said("max_length", "num_mel_bins"):  # a spectrogram
            return torch.zeros(2, *sizes)
        case "input_values":
            return torch.zeros(2, 4000)
        case "past_values" if sizes := said("context_length"):
            return torch.zeros(2, *sizes, (said("num_input_channels") or (1,))[0])
        case "pixel_values" | "input_features" | "past_values":
            return None
        case _:
            return torch.zeros(2, 4, dtype=torch.int64)
