"""As much of Triton as yafsdp_fn.optim.kernels uses, on CPU tensors: programs run one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Pointer:
    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory.view(-1), at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


_program = [0]


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    if mask is None:
        return pointer.memory[pointer.at]
    out = torch.full(mask.shape, other, dtype=pointer.memory.dtype)
    out[mask] = pointer.memory[pointer.at[mask]]  # reads nothing where the mask is off, like the real one
    return out


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    assert value.dtype == pointer.memory.dtype
    pointer.memory[pointer.at[mask]] = value[mask]


def fma(x: Any, y: Any, z: Any) -> Tensor:
    x, y, z = (torch.as_tensor(value, dtype=torch.float32).double() for value in (x, y, z))
    return (x * y + z).float()


class Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            given = [Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            given = [torch.tensor(arg) if isinstance(arg, float) else arg for arg in given]
            for _program[0] in itertools.islice(itertools.count(), grid[0]):
                self._function(*given, **constants)

        return run


def modules() -> dict[str, ModuleType]:
    """What `sys.modules` would have."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    names = {
        "program_id": lambda axis: torch.tensor(_program[0]),
        "arange": lambda start, stop: torch.arange(start, stop),
        "div_rn": torch.div,
        "sqrt_rn": torch.sqrt,
        "load": load,
        "store": store,
        "fma": fma,
        "int64": torch.int64,
        "constexpr": object,
        "tensor": Tensor,
    }
    vars(language).update(names)
    vars(triton).update({"language": language, "jit": Kernel, "cdiv": lambda a, b: -(-a // b)})
    return {"triton": triton, "triton.language": language}
