"""The errors that this package raises."""

from __future__ import annotations


class CodecError(ValueError):
    """A codec spec, a buffer or a payload is not what the codec takes; the message is one line."""


class NonFiniteError(CodecError):
    """The values to encode contain NaN or an infinity.

    Attributes:
        index: Position of the first such value. A caller that knows the schema can name the tensor.
        value: The value.
    """

    def __init__(self, index: int, count: int, value: float) -> None:
        super().__init__(f"value {index} of {count} is {value}; only finite values can be encoded")
        self.index = index
        self.value = value
