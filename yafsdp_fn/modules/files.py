"""The values of a module: its own, or tensors of a directory of safetensors, by their names in the module."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from yafsdp_fn.util.tensor_files import StoredTensor, scan_directory


class ModuleValues:
    """The parameters of a module, or, if a directory is given, its parameters and persistent buffers as safetensors
    there have them. in_memory: there is no directory

    Only headers are read. A parameter that the module has under several names may be there under any of them.
    Raises FileNotFoundError, TypeError or ValueError, naming the file and the tensor, if one is missing, of another
    shape, quantised, or there twice with other values. Warns of tensors that the module has not.
    """

    def __init__(self, module: nn.Module, directory: str | os.PathLike[str] | None) -> None:
        self._module = module
        self.in_memory = directory is None
        self._found: dict[str, StoredTensor] = {}
        if directory is None:
            return
        stored = scan_directory(Path(directory))
        held = {name: x for name, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        names: dict[int, list[str]] = {}
        for name, tensor in held.items():
            names.setdefault(id(tensor), []).append(name)
        for of_one in names.values():
            self._found |= dict.fromkeys(of_one, _found(of_one, held[of_one[0]], stored, directory))
        self._dtypes = {name: tensor.dtype for name, tensor in held.items()}
        if unread := sorted(stored.keys() - held.keys()):
            more = f" and {len(unread) - 1} more" * (len(unread) > 1)
            warnings.warn(f"functionalize: {directory} has {unread[0]}{more}, which the module has not", stacklevel=4)

    def __contains__(self, name: str) -> bool:
        """Tells whether the files have a tensor."""
        return name in self._found

    def read(self, name: str) -> Tensor:
        """Returns the tensor: a parameter's own, or, from a file, on the CPU, in the module's dtype."""
        if self.in_memory:
            return self._module.get_parameter(name).detach()
        return self._found[name].read().to(self._dtypes[name])


def _found(
    names: list[str], like: Tensor, stored: Mapping[str, StoredTensor], directory: str | os.PathLike[str]
) -> StoredTensor:
    """Returns the tensor that is there under one of `names`."""
    there = [stored[name] for name in names if name in stored]
    if not there:
        raise ValueError(
            f"functionalize: {directory} has no {' or '.join(names)}; expected the names of module.state_dict(), as "
            "module.save_pretrained or safetensors.torch.save_model write them. A tied weight is there once: is the "
            "module tied (module.tie_weights(), after accelerate's init_empty_weights)?"
        )
    first, *others = there
    if first.shape != tuple(like.shape):
        raise ValueError(f"{first.file}: {first.name} has shape {first.shape}, the module's is {tuple(like.shape)}")
    if like.is_floating_point():
        _ = first.dtype  # raises for one that is quantised
    for other in others:
        if not torch.equal(first.read(), other.read()):
            raise ValueError(
                f"{other.file}: {other.name} is not {first.name}, and the module has one parameter for both; make the "
                "module untied (tie_word_embeddings=False), or delete the tensor that is not of this model"
            )
    return first
