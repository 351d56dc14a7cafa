"""Wire formats: what units travel in, where that is not a dtype.

    whole = format.decode(format.encode(w))      # what blocks see of a weight, and what sums add of a gradient

Elements are encoded in blocks, each with its scale, so that ranks cut vectors between blocks and need nothing from each
other. A vector has the same blocks at every number of ranks: the plain loop of a format passes each leaf through it,
and differentiates as if it did not (`passed`, straight-through).
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.communication.ranks import CHUNK
from yafsdp_fn.util.mesh_axes import ALIGN


class Format:
    """A wire format: a subclass encodes blocks of `block` elements to `block_bytes` bytes each.

    name: what ranks compare, and programs say; equal names mean equal bytes
    block_bytes: at most those of a block in the dtype that it takes the place of
    stochastic: it rounds by `noise(numbers, self.updates)`; updates: 0, but for moments (`at`)
    kept: slots hold the bytes as they have come, and blocks read them (`ya.formats.Float8`)
    Values that are not finite must come back not finite: a step with such gradients is skipped.

    >>> class Halves(ya.formats.Format):
    ...     name, block, block_bytes = "bfloat16", 8, 16
    ...
    ...     def encode(self, blocks):
    ...         return blocks.bfloat16().view(torch.uint8)
    ...
    ...     def decode(self, encoded, dtype):
    ...         return encoded.view(torch.bfloat16).to(dtype)
    >>> ya.formats.passed(Halves(), torch.tensor([1.0, 1.001]))
    tensor([1., 1.])
    """

    name: str
    block: int
    block_bytes: int
    stochastic: bool = False
    updates: int | Tensor = 0
    kept: bool = False

    def encode(self, blocks: Tensor) -> Tensor:
        """Encodes blocks [B, block], of any floating dtype, to bytes [B, block_bytes], uint8."""
        raise NotImplementedError

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes bytes [B, block_bytes], a copy of what has come, to blocks [B, block] of `dtype`."""
        raise NotImplementedError

    def nbytes(self, numel: int) -> int:
        """Returns the bytes of a vector of `numel` elements, a multiple of `block`."""
        return numel // self.block * self.block_bytes

    def numel(self, nbytes: int) -> int:
        """Returns the elements of a vector of `nbytes` bytes."""
        return nbytes // self.block_bytes * self.block

    def at(self, updates: int | Tensor) -> "Format":
        """Returns the format in which an optimizer that has made so many updates keeps its state after the next one."""
        found = copy.copy(self)
        vars(found)["updates"] = updates
        return found


class _OneScale(Format):
    """Blocks of bytes that are numbers, behind a scale in float32."""

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        return SCALE_BYTES + self.block

    def _named(self, numbers: str) -> str:
        return f"{numbers}/{self.block}{' stochastic' * self.stochastic}"


@dataclasses.dataclass(frozen=True)
class Scaled(_OneScale):
    """Numbers of 8 bits, and a scale in float32 for each block, which takes its largest element to the largest number.

    dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2; block: elements that share a scale
    stochastic: an element becomes one of the two numbers around it, by chance (`noise`), so that its mean is itself

    >>> int8 = ya.formats.Scaled(torch.int8, block=32)
    >>> int8.name, int8.block_bytes, ya.formats.passed(int8, torch.linspace(-1, 1, 32))[:2]
    ('int8/32', 36, tensor([-1.0000, -0.9370]))
    """

    dtype: torch.dtype = torch.int8
    block: int = 64
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            known = ", ".join(map(str, LARGEST))
            raise TypeError(f"Scaled: dtype={self.dtype!r:.80}: expected one of {known}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._named(str(self.dtype).removeprefix("torch."))

    def encode(self, blocks: Tensor) -> Tensor:
        blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
        largest = LARGEST[self.dtype]
        scale = (blocks.abs().amax(-1, keepdim=True) / largest).float()
        numbers = blocks / torch.where(scale == 0, 1, scale)
        if self.stochastic:
            apart = self._apart(numbers)
            steps = numbers / apart
            numbers = (steps + noise(steps, self.updates)).floor() * apart
        elif self.dtype == torch.int8:
            numbers = numbers.round()
        numbers = numbers.clamp(-largest, largest)
        # where a scale is not finite, what it scales does not matter
        return torch.cat([scale.view(torch.uint8), numbers.to(self.dtype).view(torch.uint8)], -1)

    def _apart(self, numbers: Tensor) -> Tensor | float:
        """Returns the distance between the numbers of 8 bits around each of `numbers`: a power of two."""
        if self.dtype == torch.int8:
            return 1.0
        finfo = torch.finfo(self.dtype)
        power = (numbers.float().view(torch.int32) & EXPONENT).view(torch.float32)
        return power.clamp(min=finfo.smallest_normal) * finfo.eps

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        scale = _scale_of(encoded)
        numbers = encoded[:, SCALE_BYTES:].view(self.dtype)
        return (numbers.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)


@dataclasses.dataclass(frozen=True)
class Roots(_OneScale):
    """Bytes that are the fourth roots of elements, and a scale for each block, as for `Scaled`: for the moments of
    optimizers (`ya.optim.in_format`). Elements down to 1e-6 of the largest are off by a part of themselves; none but a
    zero becomes one. A block of second moments, which has no negative elements, has twice as many numbers.

    stochastic: as for `Scaled`. The mean is that of elements, not of their roots; elements below the smallest number of
        their block become that number, as they do without

    >>> moments = ya.formats.Roots(block=4)
    >>> ya.formats.passed(moments, torch.tensor([1.0, 1e-3, 1e-6, 0.0]))
    tensor([1.0000e+00, 9.6982e-04, 9.6872e-07, 0.0000e+00])
    """

    block: int = 64
    stochastic: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._named("roots")

    def encode(self, blocks: Tensor) -> Tensor:
        blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
        # square roots, not powers, whose last bit depends on where in a tensor an element lies
        roots = blocks.abs().sqrt().sqrt()
        signed = (blocks < 0).any(-1, keepdim=True)
        largest = torch.where(signed, 127, 255)
        scale = (roots.amax(-1, keepdim=True) / largest).float()
        numbers = roots / torch.where(scale == 0, 1, scale)
        if self.stochastic:
            below = numbers.floor()
            low, here, high = (_fourth_power(each) for each in (below, numbers, below + 1))
            numbers = below + (low + noise(numbers, self.updates) * (high - low) < here)
        numbers = numbers.round().clamp(min=1).minimum(largest)
        numbers = numbers.short() * blocks.sign().short()
        return torch.cat([torch.where(signed, -scale, scale).view(torch.uint8), numbers.to(torch.uint8)], -1)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        scale = _scale_of(encoded)
        numbers = encoded[:, SCALE_BYTES:]
        wide = torch.promote_types(dtype, torch.float32)
        roots = torch.where(scale < 0, numbers.view(torch.int8).to(wide), numbers.to(wide)) * scale.abs()
        return _fourth_power(roots).to(dtype)


def _fourth_power(roots: Tensor) -> Tensor:
    squares = roots * roots.abs()
    return squares * squares.abs()


def _scale_of(encoded: Tensor) -> Tensor:
    return encoded[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)


SCALE_BYTES = 4
EXPONENT = 0x7F800000  # its bits in a float32
LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The dtypes of `Scaled`, and their largest numbers."""


# ---- Noise, for formats that round stochastically.
#
#     number = floor(number + noise)       # noise is uniform in [0, 1), so that the mean is the number
#
# It is a hash of the block, so an encoding depends on its block alone, as without: on no rank, mesh, schedule or
# generator. Blocks of ranks and of steps differ, and so does their noise: errors average out.

FINE = 16
"""Parts of a step that noise tells apart. With more, weights that another order of sums has changed in their last bit
would have other noise more often; with fewer, a block that changes little would keep its noise for long."""

GOLDEN = -1640531527
FACTORS = ((16, 0x7FEB352D), (15, -2073254261))
"""2 ** 32 over the golden ratio, and shifts and factors of a hash of 32 bits by Chris Wellons."""


def noise(numbers: Tensor, updates: int | Tensor = 0) -> Tensor:
    """Returns noise in [0, 1) for blocks [B, block], in float32: the same for the same block, wherever it lies.

    numbers: between neighbours that are 1 apart. A 16th of that in one of them changes the noise of the whole block
    updates: another number, other noise. Moments need it: what has been rounded differs little from a number

    >>> numbers = torch.full((1000, 64), 0.3) + torch.arange(1000)[:, None]
    >>> ((numbers + ya.formats.noise(numbers)).floor() - numbers).mean().abs() < 0.01
    tensor(True)
    """
    places = torch.arange(numbers.shape[-1], dtype=torch.int32, device=numbers.device) * GOLDEN
    fine = (numbers * FINE).round().int()
    of_block = _hashed(fine + places).sum(-1, keepdim=True, dtype=torch.int32) ^ updates
    return (_hashed(of_block + places) >> 8 & 0xFFFFFF).float() * 2**-24


def _hashed(bits: Tensor) -> Tensor:
    """Returns a hash of each number of 32 bits. Sums and products wrap; a shift keeps the sign, which a mask takes
    off."""
    for shift, factor in FACTORS:
        bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor
    return bits


# ---- What a unit travels in.


class Wire(NamedTuple):
    """The formats of a leaf: gather: of its weights; reduce: of its gradient, whose parts are then summed in float32.
    None: a dtype, as `Precision` and the leaf say.

    >>> wire = ya.Wire(gather=ya.formats.Scaled())
    >>> state = ya.init({"layers": ya.Stacked({"w": ya.Param((2, 64, 64), wire=wire)})}, mesh=mesh)
    >>> state.memory.units[0].gather_bytes, state.memory.units[0].gathered_as.nbytes
    (16384, 4352)
    """

    gather: Format | None = None
    reduce: Format | None = None

    @property
    def align(self) -> int:
        """Elements at whose multiples leaves begin and shards are cut."""
        return math.lcm(ALIGN, *(format.block for format in self if format is not None))

    def __str__(self) -> str:
        named = [f"{way}={format.name}" for way, format in zip(self._fields, self, strict=True) if format is not None]
        return ", ".join(named)


WHOLE = Wire()


def checked_wire(what: str, wire: Wire) -> Wire:
    """Returns a `Wire` of formats. Raises TypeError, naming `what`, for anything else, and ValueError for blocks that
    cannot be."""
    if not isinstance(wire, Wire):
        raise TypeError(f"{what}: expected a ya.Wire, such as ya.Wire(gather=ya.formats.Scaled()), got {wire!r:.80}")
    for way, format in zip(wire._fields, wire, strict=True):
        if format is not None:
            check_format(f"{what}.{way}", format)
    return wire


def check_format(what: str, format: Format) -> None:
    """Raises TypeError, naming `what`, for anything that is no format, and ValueError for blocks that cannot be."""
    if not isinstance(format, Format):
        raise TypeError(f"{what}: expected a ya.formats.Format or None, got {format!r:.80}")
    if format.block < 1 or format.block_bytes < 1:
        sizes = f"{format.block} elements in {format.block_bytes} bytes"
        raise ValueError(f"{what}: expected blocks of an element and a byte at least, got {sizes}")


# ---- Vectors, a part at a time: what a format allocates stays in a core's cache. A vector and its bytes may share
# memory, if both begin there (to encode) or both end there (to decode): each part is read before it is overwritten.


def encode(format: Format, values: Tensor, out: Tensor) -> None:
    """Encodes `values` [N] to `out`, its bytes."""
    blocks = values.detach().view(-1, format.block)
    rows = out.view(-1, format.block_bytes)
    for part in _parts(len(blocks), format, values):
        rows[part].copy_(format.encode(blocks[part]))


def decode(format: Format, encoded: Tensor, out: Tensor) -> None:
    """Decodes bytes to `out` [N]."""
    rows = encoded.view(-1, format.block_bytes)
    blocks = out.view(-1, format.block)
    for part in _parts(len(blocks), format, out):
        blocks[part].copy_(format.decode(rows[part].clone(), out.dtype))


def decoded_parts(format: Format, encoded: Tensor, ranks: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Decodes the same part of what each rank has sent, part after part: yields the elements that it is of a shard, and
    [ranks, elements]."""
    rows = encoded.view(ranks, -1, format.block_bytes)
    for part in _parts(rows.shape[1], format, encoded, ranks):
        blocks = format.decode(rows[:, part].reshape(-1, format.block_bytes), dtype)
        yield slice(part.start * format.block, part.stop * format.block), blocks.view(ranks, -1)


def _parts(blocks: int, format: Format, of: Tensor, ranks: int = 1) -> Iterator[slice]:
    step = max(1, CHUNK.get(of.device.type, blocks) // (format.block * ranks))
    # without values the first part has the allocations of all, of which a large plan has a million
    stop = min(step, blocks) if isinstance(of, FakeTensor) else blocks
    return (slice(start, min(start + step, blocks)) for start in range(0, stop, step))


# ---- Passing through a format, outside of programs.


def passed(format: Format, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `values`, a leaf or a flat vector, as they come out of a format, in `dtype` or their own: without a
    gradient. A leaf is encoded as the flat vector that it is, the rest of its last block zeros.

    >>> ya.formats.passed(ya.formats.Scaled(), torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0000, 0.5039, 1.0000])
    """
    dtype = dtype or values.dtype
    flat = values.detach().reshape(-1)
    rest = -flat.numel() % format.block
    blocks = torch.nn.functional.pad(flat, (0, rest)).view(-1, format.block)
    return format.decode(format.encode(blocks), dtype).view(-1)[: flat.numel()].view(values.shape)


class Encoded(NamedTuple):
    """A format and the dtypes around it, as differentiable collectives take it in place of a dtype (differentiable.py).

    before: the dtype that is encoded; dtype: the one that is decoded to
    """

    format: Format
    before: torch.dtype
    dtype: torch.dtype


def as_sent(values: Tensor, how: torch.dtype | Encoded) -> Tensor:
    """Returns `values` [N, ...] as others receive them; each column is a flat vector."""
    if isinstance(how, torch.dtype):
        return values.to(how)
    columns = values.to(how.before).movedim(0, -1)
    return passed(how.format, columns.contiguous(), how.dtype).movedim(-1, 0)


def straight(how: object) -> object:
    """Returns the dtype of what travels in a format; all else as it is. Tangents pass by formats."""
    return how.dtype if isinstance(how, Encoded) else how
