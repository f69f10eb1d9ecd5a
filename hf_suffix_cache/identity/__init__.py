"""
Whose rows these are: which rows may meet, those of one model that computes as it did when they were stored.

An identity is one state of one model object: the tensors that act in its forward (weak reference, address, version
counter), the plain settings of its modules and configs, its hooks and replaced forwards, and a digest of elements
sampled from every tensor. All but the digest is compared at each call; the digest, too, where it costs next to nothing
(all tensors in plain memory), and else for prompts above 200 tokens and whenever another state was met before.

What is seen: optimiser steps, `load_state_dict`, in-place edits, moves and casts, new tensors in old places, adapters
(content, choice, scale, merging), other weights behind accelerate's offloading; scales and windows and all else that
attributes of modules and fields of configs hold, in lists and dicts of any depth and length: plain values, numbers and
arrays of numpy, tensors, and other objects when they are replaced; hooks; methods of modules and of their classes, and
functions and plain values of the source files of those classes, when they are replaced.

What can't be seen, and needs `cache.clear()`:

* writes through `.data`, `.detach().numpy()` and the like that leave all sampled elements as they were: torch counts
  no version for them. (Writes to all of a tensor are seen; on another device than the CPU only from the next prompt
  above 200 tokens.)
* edits of some elements of a model that was made in `torch.inference_mode()`, for the same reason: its tensors have no
  version counter at all, so an edit is seen only if it meets a sampled element.
* what a foreign hook, a replaced forward or an object in an attribute keeps for itself: only the hook and the forward
  themselves are seen, not what they read. Of a module that lies in an attribute's list or dict only, the tensors are
  seen; of a large numpy array, some 4,096 elements.
* functions that were replaced outside the files which define the model's modules, `torch.nn.functional` for example,
  methods that all modules or all models of transformers have, and entries of lists and dicts of those files.
* files behind disk offload that were changed without a change of size or time.
"""

from .adapters import refusal
from .table import Identity, IdentityTable

__all__ = ["Identity", "IdentityTable", "refusal"]
