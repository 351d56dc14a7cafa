"""Wire formats, for users (docs/formats.md): `communication/formats.py` has them."""

from yafsdp_fn.api.relative_errors import relative_errors
from yafsdp_fn.communication.formats import Format, Roots, Scaled, noise, passed

__all__ = ["Format", "Roots", "Scaled", "noise", "passed", "relative_errors"]
