"""Wire formats, and products in float8, for users (docs/formats.md): `communication/formats.py` and `nn/float8.py`."""

from yafsdp_fn.api.relative_errors import relative_errors
from yafsdp_fn.communication.formats import Format, Roots, Scaled, noise, passed
from yafsdp_fn.nn.float8 import Float8, float8

__all__ = ["Float8", "Format", "Roots", "Scaled", "float8", "noise", "passed", "relative_errors"]
