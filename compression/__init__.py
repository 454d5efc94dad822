"""Codecs: flat fp32 vectors to bytes and back."""

from equipoise.compression.buffers import Values
from equipoise.compression.choice import kernels, kernels_for
from equipoise.compression.chunks import first_non_finite
from equipoise.compression.codec import Codec
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.spec import parse_codec

__all__ = [
    "Codec",
    "CodecError",
    "NonFiniteError",
    "Values",
    "first_non_finite",
    "kernels",
    "kernels_for",
    "parse_codec",
]
