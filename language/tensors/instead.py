"""Replacements for other libraries' calls that need a tensor's memory in this process."""

from __future__ import annotations

import sys
from types import FrameType

STAGER = "torch.distributed.checkpoint._state_dict_stager"
"""Copies tensors' memory for `dcp.async_save`."""

_INSTEAD = {
    ("transformers.modeling_utils", "save_pretrained"): (
        'monarch.save(model, "out/model.safetensors").result()   # right: each worker writes its part\n'
        'model.config.save_pretrained("out")                     # from_pretrained("out") reads both'
    ),
    ("transformers.modeling_utils", "resize_token_embeddings"): (
        "model.resize_token_embeddings(n)                    # right: before it is placed\n"
        "model = monarch.module_to_mesh(model, mesh, layouts=...)"
    ),
    ("transformers.trainer", "train"): (
        "transformers' Trainer places models and batches itself, for processes of its own. Write the loop "
        "(docs/howto/hugging-face.md), or use Lightning's Trainer with monarch.lightning.MeshStrategy."
    ),
    ("accelerate.accelerator", "save_state"): (
        "accelerator.save_state(folder, safe_serialization=False)   # right: plain tensors, as torch.save writes them"
    ),
    ("safetensors.torch", "load_model"): 'monarch.load("model.safetensors", into=model)     # right: strict=False too',
    (STAGER, "stage"): (
        'monarch.save({"model": model, "optimizer": optimizer}, path)   # right: returns at once, and writes the '
        "values of now\ndcp.save(state, checkpoint_id=path)                              # or wait for it"
    ),
}


def instead(otherwise: str) -> str:
    """The replacement of the other library's call in which this process is now; without one `otherwise`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _INSTEAD.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found is not None:
            return found
        frame = frame.f_back
    return otherwise


__all__ = ["STAGER", "instead"]
