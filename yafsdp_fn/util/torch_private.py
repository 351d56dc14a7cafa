"""All names of torch that torch does not promise to keep, each with the reason why no public one serves.

Look here first when a new version of torch breaks something. Two kinds stay where they are used: names of torch's
documented extension protocols (`TorchDispatchMode`, `FakeTensorMode`, a process group's methods), and attributes of
tensors (`_version`, `_backward_hooks`), which a name here would only hide.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, overrides
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Any)

transforms_active = torch._C._are_functorch_transforms_active
"""Returns whether code runs inside torch.func: no public function tells."""

is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
"""Returns whether a tensor belongs to a transform, in which it requires grad without saying so."""

eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns a function inside what torch.compile has wrapped, traced or not: the public flags tell of tracing alone."""

graph_task_id = torch._C._current_graph_task_id
"""Returns the number of this thread's run of autograd: tells a backward from one inside it."""

saved_tensors_hooks_active = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks on saved tensors, None without: hooks inside torch.func raise, so one has to ask before."""

function_mode: Any = overrides._get_current_function_mode
without_function_mode: Any = overrides._pop_mode_temporarily
"""The innermost mode of torch functions, and a context without it."""

run_autograd = _engine_run_backward
"""`torch.autograd.grad` that function modes do not see: the mode that calls it handles `torch.autograd.grad` itself."""

SingleLevelFunction: Any = _SingleLevelFunction
"""`torch.autograd.Function` without the search for wrappers of torch.func, some 8 us a call: where none is active."""

fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_
"""The kernels of `torch.optim.AdamW(fused=True)` and its like on lists of tensors: the classes own their state."""

FUSED_IN_PLACE = (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_, torch.ops.aten._fused_sgd_)
"""These kernels as dispatch modes see them: some overloads have no implementation for fake tensors."""

foreach_copy = torch._foreach_copy_
"""Copies lists in one launch, with casts."""

foreach_norm: Any = torch._foreach_norm
"""Norms of lists in one launch; with `dtype`, a GPU adds up in that, without copies, as `vector_norm` does not."""

assert_async = torch._assert_async
"""An assertion on the device, without a wait of the host."""

AllGatherOptions: Any = dist.distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]
"""Options of a process group's method; `torch.distributed` has only those of reduce-scatters."""

FAKE_HAS_NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors whose values are read; for `numpy()` see `asks_for_values`."""


def causal_to_the_last(queries: int, keys: int) -> Tensor:
    """Returns the mask with which the last query sees all keys, and each one before it one key less: torch's public
    one, which cannot be made where a mode handles new tensors, such as that of fake ones."""
    # a second, since it brings the compiler along
    from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right

    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    with _disable_current_modes(), torch._C._DisableFuncTorch():  # it belongs to no transform
        found = CausalBias.__new__(CausalBias)  # without elements: causal_lower_right allocates [2, queries, keys]
        CausalBias.__init__(found, CausalVariant.LOWER_RIGHT, queries, keys)
        return found


def diagonal_of(mask: Any) -> Literal["first", "last"] | None:
    """Returns whether the diagonal of a `CausalBias` begins at the first query and key, or ends at the last ones; None
    for any other mask."""
    bias: Any = sys.modules.get("torch.nn.attention.bias")  # else nobody has made one
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    return "last" if mask.variant is bias.CausalVariant.LOWER_RIGHT else "first"


def asks_for_values(error: Exception) -> bool:
    """Returns whether a fake tensor raised `error` because it has no values."""
    return isinstance(error, FAKE_HAS_NO_VALUE) or "not supported for tensor subclasses" in str(error)


def mixes_traces(error: Exception) -> bool:
    """Returns whether a mode of fake tensors raised `error` at one of another mode."""
    return isinstance(error, AssertionError) and "Mixing fake modes" in str(error)


def default_group() -> ProcessGroup:
    """Returns the default process group itself; `dist.group.WORLD` is None before it is made."""
    group: ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def forget_groups() -> list[Any]:
    """Forgets all process groups without ending them, and returns what must be kept: a fork of a process that has some
    lacks their threads, for which `dist.destroy_process_group`, and freeing them, would wait."""
    c10d: Any = dist.distributed_c10d
    kept: list[Any] = [list(getattr(c10d._world, "comms", ()))]
    names = "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg pg_coalesce_state"
    c10d._update_default_pg(None)
    for name in names.split():
        kept.append(dict(getattr(c10d._world, name)))
        getattr(c10d._world, name).clear()
    c10d._world.group_count = 0
    c10d._unregister_all_process_groups()
    return kept


def cuda_is_lost() -> bool:
    """Returns whether this process is a fork of one that had used CUDA, which a fork cannot use then."""
    return bool(torch.cuda._is_in_bad_fork()) and torch.cuda.device_count() > 0


@contextmanager
def without_driver() -> Iterator[None]:
    """Has torch look for GPUs without CUDA's driver, as a mode of fake tensors does where it is entered: no fork of a
    process that has started the driver can use it."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name, "0")  # as without it
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ[name] = before


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Returns the backend that a group uses for a device, with its options and its registered memory."""
    return group._get_backend(device)


def make_communicator(group: ProcessGroup, device: torch.device) -> None:
    """Makes NCCL's communicator of a group, which it makes at first use, without the buffers that using it takes. No
    public function does so for a group of some ranks. Other backends have none."""
    if group.name() == "nccl":
        backend_of(group, device).eager_connect_single_device(device)


def serves(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether a group has a backend for a device: that of `init_process_group("nccl")` has none for the CPU."""
    try:
        backend_of(group, device)
    except RuntimeError:
        return False
    return True


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns how long the group's collectives wait for others, on another device if there are none on this one; None
    if the backend does not say."""
    at = device if serves(group, device) else group._device_types[0]
    found: timedelta | None = getattr(getattr(backend_of(group, at), "options", None), "_timeout", None)
    return found


def side_store(prefix: str, timeout: timedelta) -> Any:
    """Returns the default process group's store with keys of its own, over its own connection if possible: one
    connection serves one thread at a time, and others may wait in theirs for minutes."""
    store: Any = dist.distributed_c10d._get_default_store()
    with suppress(
        AttributeError, NotImplementedError, RuntimeError
    ):  # of files or in memory: there is none to wait for
        store = store.clone()
        store.set_timeout(timeout)
    return dist.distributed_c10d.PrefixStore(prefix, store)


def store_port() -> int | None:
    """The port of the default process group's store, or of the rendezvous before it exists; None without a server."""
    if not dist.is_initialized():
        return int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else None
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return getattr(store, "port", None)


def memory_key(tensor: Tensor) -> int:
    """Returns a key of the memory behind a tensor, valid while it lives; `data_ptr` is 0 for fake tensors."""
    found: int = tensor.untyped_storage()._cdata
    return found


def handled() -> bool:
    """Returns whether a dispatch mode handles operations, as one of fake tensors does."""
    return torch._C._len_torch_dispatch_stack() > 0


def forward_by_hand() -> bool:
    """Returns whether forward derivatives are taken by `torch.autograd.forward_ad` itself, as `torch.func.linearize`
    does; torch.func.jvp inside that raises."""
    return forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0


def recorded() -> bool:
    """Returns whether make_fx, which linearize uses, records operations to run again without their Python code."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def forward_derivatives() -> AbstractContextManager[None]:
    """Makes the `jvp` of an `autograd.Function` itself forward-differentiable. torch disables that there, and a forward
    derivative of a forward derivative would silently lack this term."""
    found: AbstractContextManager[None] = forward_ad._set_fwd_grad_enabled(True)
    return found


def asked_by_jacfwd() -> bool:
    """Returns whether `torch.func.jacfwd`, or `hessian`, asks for the current forward derivative, in the `jvp` of an
    `autograd.Function`. Its basis looks like any other directions; only the stack tells which level of torch.func is
    its own."""
    level = torch._C._functorch.maybe_current_level()
    frame = sys._getframe()
    while frame.f_back is not None:
        callee, frame = frame, frame.f_back  # the callee is `_jvp_with_argnums`
        by_jacfwd = frame.f_code.co_qualname == "jacfwd.<locals>.wrapper_fn.<locals>.push_jvp"
        if by_jacfwd and callee.f_locals.get("level") == level:
            return True
    return False


# ---- torch.compile

COMPILES = ("torch._dynamo", "torch.nn.attention.flex_attention")
"""Modules of torch without which nothing is compiled."""


def not_compiled() -> AbstractContextManager[Any]:
    """Runs compiled functions uncompiled: a compiled one would show no operations, and refuses to."""
    compiled = not sys.modules.keys().isdisjoint(COMPILES)  # else there are none, and the import takes seconds
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def outside_graphs(function: Function) -> Function:
    """Marks a function that torch.compile calls as it is, between two graphs; `fullgraph=True` is refused.

    `torch.compiler.disable` does the same by a wrapper, and imports torch._dynamo, which takes seconds.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # with all that it calls
    frames.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # a caller that is compiled does not take it in
    return function
