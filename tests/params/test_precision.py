"""Precision: three dtypes, each with a default, and what they do on one rank."""

from __future__ import annotations

import dataclasses
import warnings

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import one_rank, param

BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64


def test_defaults_follow_param() -> None:
    assert dataclasses.astuple(ya.Precision()) == (F32, F32, F32, None, True)
    assert dataclasses.astuple(ya.Precision(param=F64)) == (F64, F64, F64, None, True)
    assert dataclasses.astuple(ya.Precision(compute=BF16)) == (F32, BF16, F32, None, True)
    assert ya.Precision(compute=BF16, reduce=BF16) == ya.Precision(F32, BF16, BF16)
    assert hash(ya.Precision()) == hash(ya.Precision(F32))


@pytest.mark.parametrize("field", ["param", "compute", "reduce"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_refused_by_field(field: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"Precision.{field}: expected a 16, 32 or 64-bit floating dtype, got {dtype}"):
        ya.Precision(**{field: dtype})


def test_a_copy_is_kept_or_not() -> None:
    with pytest.raises(TypeError, match=r"Precision\.copy=torch\.bfloat16: expected True or False"):
        ya.Precision(F32, BF16, F32, None, BF16)  # type: ignore[arg-type]


def test_accumulate_is_none_or_at_least_as_wide_as_reduce() -> None:
    assert ya.Precision().sum_dtype_of(F32) is None
    assert ya.Precision(accumulate=F32).sum_dtype_of(F32) is None
    assert ya.Precision(reduce=BF16).sum_dtype_of(BF16) is None
    assert ya.Precision(reduce=BF16, accumulate=F32).sum_dtype_of(BF16) is F32
    assert ya.Precision(accumulate=F64).sum_dtype_of(F32) is F64
    with pytest.raises(TypeError, match=r"Precision.accumulate: torch.bfloat16 is narrower than reduce=torch.float32"):
        ya.Precision(accumulate=BF16)
    with pytest.raises(TypeError, match=r"Precision.accumulate: expected a 16, 32 or 64-bit floating dtype"):
        ya.Precision(accumulate=torch.int64)


@pytest.mark.parametrize("field", ["compute", "reduce", "accumulate"])
def test_float16_is_refused_where_it_would_overflow(field: str) -> None:
    with pytest.raises(TypeError, match=rf"Precision.{field}: float16 overflows, .* use bfloat16"):
        ya.Precision(**{field: torch.float16})


@pytest.mark.parametrize(("dtype", "least"), [(BF16, 256), (torch.float16, 2048)])
def test_training_in_16_bits_is_warned_of(dtype: torch.dtype, least: int) -> None:
    precision = ya.Precision(param=dtype, compute=BF16, reduce=BF16)
    with pytest.warns(
        UserWarning, match=rf"less than 1/{least} of its parameter is lost.*Precision\(compute="
    ) as caught:
        state = ya.init({"w": param(8)}, ya.optim.sgd(1.0), mesh=one_rank(), precision=precision)
    assert [warning.filename for warning in caught] == [__file__]
    ones = optree.tree_map(torch.ones_like, state.params)
    for size, moves in ((0.9 / least, False), (2.1 / least, True)):
        moved = ya.optim.apply_updates(ones, optree.tree_map(lambda x, of=size: x * of, ones))
        assert torch.equal(moved["w"].leaves[0], ones["w"].leaves[0]) != moves


@pytest.mark.parametrize("precision", [ya.Precision(), ya.Precision(compute=BF16, reduce=BF16), ya.Precision(F64)])
def test_what_keeps_float32_is_not_warned_of(precision: ya.Precision) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ya.init({"w": param(8)}, ya.optim.sgd(1.0), mesh=one_rank(), precision=precision)
        ya.init({"w": param(8)}, None, mesh=one_rank(), precision=ya.Precision(BF16))  # never trained
        ya.init({"w": ya.frozen(param(8))}, ya.optim.sgd(1.0), mesh=one_rank(), precision=ya.Precision(BF16))
