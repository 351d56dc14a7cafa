"""Every name of torch that torch does not promise to keep, each with the reason why no public one serves.

When a new version of torch breaks something, this is where to look first. Two kinds stay where they are used: names of
torch's own documented protocols for extensions (`TorchDispatchMode`, `FakeTensorMode`, a process group's methods), and
attributes of tensors (`_version`, `_backward_hooks`), which a name here would only hide.
"""

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup

transforms_active = torch._C._are_functorch_transforms_active
"""Whether code runs inside of torch.func: there is no public question."""

is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform: it requires grad there without saying so."""

graph_task_id = torch._C._current_graph_task_id
"""Number of the run of autograd that this thread is in: tells a backward from one inside of it."""

saved_tensors_hooks_active = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks on saved tensors, None without: hooks inside torch.func raise, so one has to ask before."""

run_autograd = _engine_run_backward
"""`torch.autograd.grad` that function modes do not see: the mode that calls it handles `torch.autograd.grad` itself."""

SingleLevelFunction: Any = _SingleLevelFunction
"""`torch.autograd.Function` without the search for wrappers of torch.func, some 8 us a call: where none is active."""

fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_
"""The kernels of `torch.optim.AdamW(fused=True)` and its like on lists of tensors: the classes own their state."""

FUSED_IN_PLACE = (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_, torch.ops.aten._fused_sgd_)
"""The same as dispatch modes see them: some overloads have no implementation for fake tensors."""

foreach_copy = torch._foreach_copy_
"""Copies lists in one launch, with casts."""

assert_async = torch._assert_async
"""An assertion on the device, without a wait of the host."""

AllGatherOptions: Any = dist.distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]
"""Of a process group's methods; `torch.distributed` has those of reduce-scatters alone."""

FAKE_HAS_NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where code asks for their values."""


def default_group() -> ProcessGroup:
    """The default process group itself; `dist.group.WORLD` is None before it is made."""
    group: ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend that a group uses for a device, with its options and its registered memory."""
    return group._get_backend(device)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """How long its collectives wait for others; None where the backend does not say."""
    found: timedelta | None = getattr(getattr(backend_of(group, device), "options", None), "_timeout", None)
    return found


def side_store(prefix: str, timeout: timedelta) -> Any:
    """The store of the default process group with keys of its own, over a connection of its own where it has any: one
    connection answers one thread at a time, and others may wait in theirs for minutes."""
    store: Any = dist.distributed_c10d._get_default_store()
    with suppress(
        AttributeError, NotImplementedError, RuntimeError
    ):  # of files or in memory: there is none to wait for
        store = store.clone()
        store.set_timeout(timeout)
    return dist.distributed_c10d.PrefixStore(prefix, store)


def store_in_process() -> Any:
    """A rendezvous store for a process group of one."""
    return torch._C._distributed_c10d.HashStore()


def memory_key(tensor: Tensor) -> int:
    """Names the memory behind a tensor as long as it lives; `data_ptr` is 0 for fake tensors."""
    found: int = tensor.untyped_storage()._cdata
    return found


def forward_by_hand() -> bool:
    """Whether forward derivatives are taken by `torch.autograd.forward_ad` itself, as `torch.func.linearize` does:
    torch.func.jvp inside of that raises."""
    return forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0


def recorded() -> bool:
    """Whether operations are recorded to be run again without their Python code: by make_fx, which linearize calls."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def inside_jacfwd() -> bool:
    """Whether `torch.func.jacfwd` is at work, or `hessian`, which calls it: its basis looks like any other directions,
    so that only the stack tells."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_qualname == "jacfwd.<locals>.wrapper_fn":
            return True
    return False
