"""Numbers of cuDNN's data types as bytes: random inputs for a graph, and whether two outputs are the same.

Plain Python: inputs are one block of random values that the device repeats, and of outputs that are not equal byte by
byte only a bounded sample is decoded.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import inf, isnan, nan
from random import Random

from plancache.errors import RunError

# Values in a block: a prime, so that no two rows of a tensor are the same.
BLOCK = 16381
# Elements that are decoded of one output.
SAMPLE = 1 << 18
_PIECE = 4096  # bytes
_SPREAD = 7919  # a prime: where the sample of a piece begins
# By name of the data type: bits of an element.
_BITS = {
    **dict.fromkeys(("DOUBLE", "INT64"), 64),
    **dict.fromkeys(("FLOAT", "INT32"), 32),
    **dict.fromkeys(("HALF", "BFLOAT16"), 16),
    **dict.fromkeys(("INT8", "UINT8", "BOOLEAN", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0"), 8),
    **dict.fromkeys(("FP4_E2M1", "INT4"), 4),
}
# How far two right results may be apart, relative to the largest value: what one rounding of the type makes, and some
# room for sums in another order (TF32 for FLOAT).
_TOLERANCE = {
    "DOUBLE": 1e-9,
    "FLOAT": 4e-3,
    "HALF": 1e-2,
    "BFLOAT16": 3e-2,
    "FP8_E4M3": 0.15,
    "FP8_E5M2": 0.3,
    "FP4_E2M1": 0.5,
    "FP8_E8M0": 0.5,
}
_INTEGERS = {"INT64": "q", "INT32": "i", "INT8": "b", "UINT8": "B", "BOOLEAN": "B", "INT4": "B"}


def span(data_type: str, elements: int) -> int:
    """Bytes of so many elements.

    Raises:
        RunError: the type is not known here.
    """
    if data_type not in _BITS:
        raise RunError("tensors of this type cannot be filled here", found=data_type, expected=", ".join(_BITS))
    return -(-elements * _BITS[data_type] // 8)


def block(data_type: str, seed: int, low: float, high: float) -> bytes:
    """Random values between `low` and `high`, the same ones for the same seed; small numbers for whole ones."""
    rng = Random(seed)
    if data_type in ("FP4_E2M1", "INT4"):
        return rng.randbytes(BLOCK)
    if data_type in _INTEGERS:
        smallest, largest = (0, 1) if data_type == "BOOLEAN" else (-3 if low < 0 and data_type[0] == "I" else 0, 3)
        return array(_INTEGERS[data_type], rng.choices(range(smallest, largest + 1), k=BLOCK)).tobytes()
    if data_type.startswith("FP8"):
        # None that is nearly nothing beside the others: what a scale of 2 to the 60th does, nobody compares.
        codes = [code for code, value in enumerate(_table(data_type)) if low <= value <= high and abs(value) > 0.03]
        return bytes(rng.choices(codes, k=BLOCK))
    values = [rng.uniform(low, high) for _ in range(BLOCK)]
    if data_type == "HALF":
        return struct.pack(f"<{BLOCK}e", *values)
    if data_type == "BFLOAT16":
        return memoryview(array("f", values)).cast("B").cast("H")[1::2].tobytes()
    return array("d" if data_type == "DOUBLE" else "f", values).tobytes()


def whole(data_type: str, values: Iterable[int]) -> bytes:
    """These whole numbers, as the type has them."""
    return array(_INTEGERS[data_type], values).tobytes()


def scalar(data_type: str, value: float) -> bytes:
    """One number."""
    if data_type in _INTEGERS:
        return whole(data_type, [int(value)])
    formats = {"DOUBLE": "<d", "FLOAT": "<f", "HALF": "<e"}
    if data_type == "BFLOAT16":
        return struct.pack("<f", value)[2:]
    if data_type not in formats:
        raise RunError("numbers of this type are not given by value", found=data_type)
    return struct.pack(formats[data_type], value)


@cache
def _table(data_type: str) -> list[float]:
    """The value of every code of a type of 16 bits or fewer."""
    if data_type == "HALF":
        return list(struct.unpack("<65536e", array("H", range(65536)).tobytes()))
    if data_type == "BFLOAT16":
        return list(struct.unpack("<65536f", array("I", (code << 16 for code in range(65536))).tobytes()))
    if data_type == "FP8_E8M0":
        return [2.0 ** (code - 127) for code in range(255)] + [nan]
    exponent, mantissa = {"FP8_E4M3": (4, 3), "FP8_E5M2": (5, 2), "FP4_E2M1": (2, 1)}[data_type]
    values = [_small_float(code, exponent, mantissa) for code in range(1 << (1 + exponent + mantissa))]
    if data_type == "FP8_E4M3":  # no infinities: only the last code is not a number
        values[0x7F] = values[0xFF] = nan
    if data_type == "FP8_E5M2":
        for sign in (0, 0x80):
            values[sign | 0x7C] = -inf if sign else inf
            values[sign | 0x7D] = values[sign | 0x7E] = values[sign | 0x7F] = nan
    return values


def _small_float(code: int, exponent: int, mantissa: int) -> float:
    sign = -1.0 if code >> (exponent + mantissa) else 1.0
    power = code >> mantissa & ((1 << exponent) - 1)
    fraction = (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (exponent - 1)) - 1
    return sign * (fraction * 2.0 ** (1 - bias) if power == 0 else (1 + fraction) * 2.0 ** (power - bias))


def _decoded(data: memoryview, data_type: str, step: int) -> list[float]:
    """Every `step`th value."""
    if data_type in ("FLOAT", "DOUBLE"):
        return array("f" if data_type == "FLOAT" else "d", data.tobytes())[::step].tolist()
    if data_type in _INTEGERS:
        return [float(value) for value in array(_INTEGERS[data_type], data.tobytes())[::step]]
    table = _table(data_type)
    if _BITS[data_type] == 4:  # two values in a byte
        return [table[half] for code in data[::step] for half in (code & 15, code >> 4)]
    codes = data.cast("H")[::step].tolist() if _BITS[data_type] == 16 else data[::step].tolist()
    return [table[code] for code in codes]


def is_empty(data: bytes, data_type: str) -> bool:
    """Whether all values are zero or NaN."""
    if data.count(0) == len(data):
        return True
    before = b""
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        # NaN are mostly the same bits: decoded one by one, a large output of them takes longer than a plan may.
        if piece != before and not all(
            value == 0.0 or isnan(value) for value in _decoded(memoryview(piece), data_type, 1)
        ):
            return False
        before = piece
    return True


@dataclass
class Difference:
    """How far an output is from the one that it should be.

    Attributes:
        exact: whether every byte is the same.
        largest: the largest distance in the sample, relative to the largest value.
        mean: the mean distance, relative to the mean value.
        data_type: the type of both.
    """

    data_type: str
    exact: bool = True
    largest: float = 0.0
    mean: float = 0.0

    @property
    def right(self) -> bool:
        """Whether that is what rounding makes."""
        tolerance = _TOLERANCE.get(self.data_type)
        if self.exact:
            return True
        if tolerance is None:  # whole numbers: one more or less where something was rounded to them
            return self.data_type in ("INT8", "UINT8") and self.largest <= 1.0
        return self.largest <= tolerance and self.mean <= 4 * tolerance

    def __str__(self) -> str:
        if self.exact:
            return "bit-equal"
        return f"off by {self.largest:.2g} of the largest value, {self.mean:.2g} of the mean"


def _ratio(value: float, by: float) -> float:
    return value / by if by else (inf if value else 0.0)


@dataclass
class _Sum:
    """How large values are."""

    count: int = 0
    total: float = 0.0
    top: float = 0.0

    def add(self, values: Iterable[float]) -> None:
        sizes = [size for size in map(abs, values) if size < inf]
        self.count += len(sizes)
        self.total += sum(sizes)
        self.top = max(self.top, max(sizes, default=0.0))


def difference(chunks: Iterable[tuple[bytes, bytes]], size: int, data_type: str) -> Difference:
    """Compare an output with what it should be, piece by piece.

    Of pieces that differ a sample of elements is looked at, in each at other places: in rows as long as some pieces a
    wrong column would else fall between them.

    Args:
        chunks: what it should be and what it is, in pieces of whole elements.
        size: bytes in all.
        data_type: the type's name.
    """
    result = Difference(data_type)
    share = max(1, SAMPLE // max(1, -(-size // _PIECE)))  # elements of each piece
    all_of, differing, most, number = _Sum(), _Sum(), 0.0, 0
    off = 0.0
    for expected, found in chunks:
        for start in range(0, len(expected), _PIECE):
            one, two = (memoryview(whole)[start : start + _PIECE] for whole in (expected, found))
            elements = len(one) * 8 // max(8, _BITS[data_type])
            number += 1
            if one == two:
                all_of.add(_decoded(one, data_type, max(1, elements // 2)))  # a few: for how large values are
                continue
            result.exact = False
            step = max(1, elements // share) | 1
            first = number * _SPREAD % step * max(8, _BITS[data_type]) // 8
            right, given = (_decoded(piece[first:], data_type, step) for piece in (one, two))
            all_of.add(right)
            differing.add(right)
            for a, b in zip(right, given, strict=True):
                distance = 0.0 if a == b or (isnan(a) and isnan(b)) else abs(a - b)
                distance = inf if isnan(distance) else distance
                most, off = max(most, distance), off + distance
    if not result.exact:
        # Small values that are left over from large ones that cancel out are as far off as those are.
        usual = all_of.total / max(1, all_of.count)
        result.largest = _ratio(most, max(differing.top, usual)) if data_type in _TOLERANCE else most
        result.mean = _ratio(off, max(differing.total, usual * differing.count))
    return result
