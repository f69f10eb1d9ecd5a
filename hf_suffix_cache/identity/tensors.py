"""Which tensors act in a model's forward, where accelerate keeps those that it offloads, and what rope recomputes."""

import os
from dataclasses import dataclass, field

import torch

LENGTH_DEPENDENT = ("dynamic", "longrope")
ROPE_STATE = ("max_seq_len_cached", "attention_scaling")


@dataclass
class Special:
    """
    A module whose tensors are not simply its own.

    Args:
        prefixes (`list[str]`): Of the buffers and attributes that its length-dependent rope recomputes in a forward.
        maps (`list[tuple]`): Weak reference to the module whose hook keeps offloaded tensors, and their prefix there.
    """

    prefixes: list[str] = field(default_factory=list)
    maps: list[tuple] = field(default_factory=list)

    def recomputes(self, name: str) -> bool:
        """Whether a buffer or attribute is state of length-dependent rope; rows are kept apart by it elsewhere."""
        if name in ROPE_STATE and self.prefixes:
            return True
        for prefix in self.prefixes:
            if name.startswith(prefix) and name[len(prefix) :] in (*ROPE_STATE, "inv_freq", "long_inv_freq"):
                return True
        return False


def rope_prefixes(module: torch.nn.Module) -> list[str]:
    """Name prefixes of the kinds of layers whose frequencies depend on the text's length; `""` for all layers."""
    kinds = module.__dict__.get("rope_type")
    if isinstance(kinds, str):
        kinds = {"": kinds}
    if not isinstance(kinds, dict):
        return []
    dependent = [layer for layer, kind in kinds.items() if any(word in str(kind) for word in LENGTH_DEPENDENT)]
    return [f"{layer}_" if layer else "" for layer in dependent]


def offloading_hooks(hook) -> list:
    """Those of a module's accelerate hooks that bring its weights from a map for each forward."""
    hooks = getattr(hook, "hooks", None) or (hook,)
    return [
        each for each in hooks if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None
    ]


def own_tensors(module: torch.nn.Module, special: Special, tensors: list, settings: list) -> None:
    """
    Add a special module's tensors. Offloaded ones are those in the map, whatever the module holds at the moment; of
    those on disk the file's name, size and time go to `settings`, and so do the original frequencies of
    length-dependent rope, which a forward puts into new tensors.
    """
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or special.recomputes(name):
            continue
        if special.prefixes and name.endswith("original_inv_freq"):
            settings.append((name, tuple(tensor.tolist())))
            continue
        tensors.append(_offloaded(special, name, settings, tensor))


def _offloaded(special: Special, name: str, settings: list, tensor: torch.Tensor) -> torch.Tensor | None:
    for reference, prefix in special.maps:
        for hook in offloading_hooks(reference().__dict__.get("_hf_hook")):
            kept = _look_up(hook.weights_map, prefix + name)
            if isinstance(kept, torch.Tensor):
                return kept
            if kept is not None:
                settings.append((name, str(tensor.dtype), tuple(tensor.shape), *kept))
                return None
    return tensor


def _look_up(kept, name: str) -> torch.Tensor | tuple | None:
    """A tensor from a map of accelerate's, or the path, size and time of its file; None if it isn't there."""
    while hasattr(kept, "dataset") and hasattr(kept, "prefix"):
        kept, name = kept.dataset, kept.prefix + name
    if isinstance(kept, dict):
        return kept.get(name)
    if name in getattr(kept, "state_dict", ()):
        return kept.state_dict[name]
    entry = getattr(kept, "index", {}).get(name)
    if entry is None:
        return None
    path = entry.get("safetensors_file") or os.path.join(kept.save_folder, f"{name}.dat")
    status = os.stat(path)
    return str(path), status.st_size, status.st_mtime_ns


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, or the plain ones inside of one whose class wraps others (quantised ones of torchao, for example)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [leaf for name in names for leaf in leaves(getattr(tensor, name))]
