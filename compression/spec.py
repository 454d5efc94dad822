"""The codecs, by their specs."""

from __future__ import annotations

from equipoise.compression.block_codecs import DEFAULT_BLOCK, Int8Codec, NF4Codec, SparseCodec
from equipoise.compression.codec import Codec, FloatCodec
from equipoise.compression.errors import CodecError
from equipoise.compression.grammar import whole
from equipoise.compression.nf4 import NF4
from equipoise.compression.registry import Registry

CODECS: Registry[Codec] = Registry("codec", "codecs", f"int8:block={2 * DEFAULT_BLOCK}")
"""All codecs; `CODECS.register` makes another one known."""

CODECS.register("fp32", lambda: FloatCodec("fp32"))
CODECS.register("fp16", lambda: FloatCodec("fp16"))
CODECS.register("bf16", lambda: FloatCodec("bf16"))
CODECS.register("int8", Int8Codec, block=whole(DEFAULT_BLOCK))
CODECS.register("nf4", NF4Codec, block=whole(NF4.block))
CODECS.register("sparse", SparseCodec, group=whole(64))


def parse_codec(spec: str) -> Codec:
    """Return the codec that `spec` names, such as "fp32", "fp16", "bf16", "int8", "int8:block=256", "nf4" or
    "sparse:group=32".

    Raises:
        CodecError: No such codec, option or value; names what came, what is known, and the nearest known name.
    """
    try:
        return CODECS.parse(spec)
    except ValueError as error:
        raise CodecError(str(error)) from None
