"""Every launch of the library, compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from yafsdp_fn.planner.cluster import Phase

triton = pytest.importorskip("triton")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
OPTIONS = {"num_warps"}
"""Of a launch, rather than arguments of the kernel."""
CAPABILITIES = (80, 90)


class Compiler:
    """Stands where a kernel does: `kernel[grid](*args, **constants)` compiles what the launch would."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability, self.made = kernel, capability, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in OPTIONS & constants.keys()}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        signature = {name: "constexpr" if name in constants else kind(value) for name, value in given.items()}
        constexprs = {name: given[name] for name, each in signature.items() if each == "constexpr"}
        aligned = [name for name, value in given.items() if isinstance(value, Tensor)]
        attrs = {(self.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = triton.compiler.ASTSource(self.kernel, signature, constexprs, attrs)
        target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
        made = triton.compile(source, target=target, options=options)
        assert made.metadata.target == target
        assert f".target sm_{self.capability}" in made.asm["ptx"]
        assert made.asm["cubin"][:4] == b"\x7fELF"
        self.made += 1


def kind(value: Any) -> str:
    """The type that a launch gives to an argument."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 else "i32" if value < 1 << 31 else "i64"


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: f"sm_{capability}")
def compilers(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Compiler]]:
    """Puts compilers for a GPU in the place of kernels of a module; none takes what was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def put(module: Any, *names: str) -> list[Compiler]:
        made = [Compiler(getattr(module, name), request.param) for name in names]
        for name, compiler in zip(names, made, strict=True):
            monkeypatch.setattr(module, name, compiler)
        return made

    return put


class Long(Tensor):
    """A tensor that says it has more elements than an int32 counts."""

    def numel(self) -> int:
        return 1 << 32


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("columns", [1, 50304])
def test_cross_entropy(compilers: Any, dtype: torch.dtype, gradient: bool, columns: int) -> None:
    from yafsdp_fn.nn import cross_entropy_kernel

    (rows,) = compilers(cross_entropy_kernel, "ROWS")
    logits = torch.empty(2, columns, dtype=dtype)
    labels = torch.zeros(2, dtype=torch.int64)
    cross_entropy_kernel.softmax_(logits, labels, torch.ones(2), gradient=gradient)
    assert rows.made == 1


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 8], ids=["one row", "rows"])
@pytest.mark.parametrize("ordered", [False, True], ids=["wide", "ordered"])
@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("size", [100, 1 << 32], ids=["", "long"])
def test_sums_of_rows(compilers: Any, rows: int, ordered: bool, add: bool, size: int) -> None:
    from yafsdp_fn.util import vector_kernels

    (kernel,) = compilers(vector_kernels, "SUM_ROWS")
    out = torch.empty(100)
    given = torch.empty(rows, 100, dtype=torch.bfloat16)
    vector_kernels.sum_rows(out if size == 100 else out.as_subclass(Long), given, torch.float32, add, ordered)
    assert kernel.made == 1


@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scale(compilers: Any, values: torch.dtype) -> None:
    from yafsdp_fn.util import vector_kernels

    (kernel,) = compilers(vector_kernels, "SCALE")
    for size in (torch.empty(100, dtype=values), torch.empty(100, dtype=values).as_subclass(Long)):
        vector_kernels.scale_(size, torch.ones(()))
    assert kernel.made == 2


@pytest.mark.sampled
@pytest.mark.parametrize("nbytes", [4, 1 << 25], ids=["one block", "blocks"])
def test_kernels_that_take_time(compilers: Any, nbytes: int) -> None:
    from benchmarks.emulated import kernels

    mark, enter, hold, copy = compilers(kernels, "MARK", "ENTER", "HOLD", "COPY")
    at = torch.zeros(1, dtype=torch.int64)
    users = torch.zeros(3, dtype=torch.int32)
    kernels.mark(at)
    resource = "node" if nbytes == 4 else "network"  # an argument of 1 is compiled in
    kernels.hold(at, users, Phase(resource, 1e-3), torch.empty(2, 1 << 20), nbytes)
    assert [mark.made, enter.made, hold.made, copy.made] == [1] * 4
