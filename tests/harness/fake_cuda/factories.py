"""What makes tensors of the fake device: `torch.empty(..., device="cuda")`, `x.to("cuda")` and their like.

They are replaced by name, since in C++ there is no such device, and no mode of torch reaches into its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.fake_cuda.log import HOST
from tests.harness.fake_cuda.tensors import DEVICE, EMPTY, CudaTensor, address

FACTORIES = ("empty", "empty_strided", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint")
FACTORIES += ("randperm", "empty_like", "zeros_like", "ones_like", "full_like", "tensor", "as_tensor", "scalar_tensor")
FROM_THE_HOST = ("tensor", "as_tensor", "scalar_tensor")


def factory(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.<name>`, which makes tensors of the device, too, and pinned memory of the host."""

    def make(*args: Any, **kwargs: Any) -> Any:
        pin = kwargs.pop("pin_memory", False)
        wanted = kwargs.get("device")
        DEVICE.look()
        if wanted is None or torch.device(wanted).type != "cuda":
            out = func(*args, **kwargs)
            if pin:
                DEVICE.waits("an allocation of pinned memory")
                DEVICE.pinned.add(address(out))
                DEVICE.made(out, HOST)
            return out
        if name == "as_tensor" and isinstance(args[0], CudaTensor):
            return args[0].to(kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs | {"device": "cpu"})
        if isinstance(out, CudaTensor):
            return out
        wrapped = CudaTensor(out.detach())
        if name in FROM_THE_HOST:
            DEVICE.sync(f"torch.{name} of data of the host")
        if name not in EMPTY:
            DEVICE.loads(name)
            DEVICE.uses(wrapped.host, True, name)
        return wrapped.requires_grad_() if kwargs.get("requires_grad") else wrapped

    return make


def moved(to: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` of tensors of the host, which may go to the device."""

    def move(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
        if device is None or device.type != "cuda":
            return to(self, *args, **kwargs)
        if not non_blocking or address(self) not in DEVICE.pinned:
            DEVICE.sync("a copy from the host")
        out = CudaTensor(self.detach().clone() if dtype is None else to(self.detach(), dtype, copy=True))
        DEVICE.uses(out.host, True, "to")
        return out

    return move


def read(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.<name>`, by which the host reads its memory: the pinned part of it is written by streams."""

    def look(self: Tensor, *args: Any) -> Any:
        if not isinstance(self, CudaTensor) and address(self) in DEVICE.pinned:
            DEVICE.uses(self, False, name, stream=HOST)
        return func(self, *args)

    return look


def patch_torch(patch: pytest.MonkeyPatch) -> None:
    """`torch.empty(..., device="cuda")` and its like; where the host reads and copies."""
    for name in FACTORIES:
        patch.setattr(torch, name, factory(name, getattr(torch, name)))
    patch.setattr(Tensor, "to", moved(Tensor.to))
    patch.setattr(Tensor, "is_pinned", lambda self: address(self) in DEVICE.pinned)
    for name in ("tolist", "item", "numpy"):
        patch.setattr(Tensor, name, read(name, getattr(Tensor, name)))
