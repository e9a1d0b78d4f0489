"""Read structures of Thrift's compact protocol: the footer and the page headers of Parquet.

    fields, end = read_structure(data, 0, {1: INT32, 3: [BINARY], 5: {2: INT64}})

Arrow's reader and this one must understand the same, or a file could show each of them other
numbers. So what Arrow would cut off or read as something else is refused: a field twice, and in the
fields of the form a number of too many bits, and a list or a value of another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Types of the protocol.
TRUE, FALSE, BYTE, INT16, INT32, INT64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
BITS = {INT16: 16, INT32: 32, INT64: 64}
MAX_DEPTH = 8  # a footer's structures nest seven deep
MAX_FIELD = (1 << 15) - 1  # Arrow cuts a field's number off at 16 bits
LONG_LIST = 15  # in the head of a list: its length follows

# The wanted fields of a structure, by number. A field is the type of a number or of bytes, a form,
# or a list of one of these, [INT64]. (INT64,) is a list of which nothing is kept. A form is
# complete in its lists: any other is refused. Other fields are passed over.
Form = Mapping[int, Any]


class ThriftError(ValueError):
    """Bytes that are none of the protocol's, or that two readers could understand differently."""


def read_structure(
    data: bytes, at: int, form: Form, *, depth: int = 0
) -> tuple[dict[int, Any], int]:
    """Return the wanted fields of the structure at an offset, by number, and where it ends.

    Raises IndexError if it goes on after `data`, ThriftError for what could be misunderstood.
    """
    if depth > MAX_DEPTH:
        raise ThriftError("a structure nests too deep")
    wanted: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        kind, before = head & 0x0F, field
        if head >> 4:
            field += head >> 4  # counted from the field before
        else:
            field, at = _number(data, at, bits=16)
        # Writers sort them, so a field that comes twice is out of order. Arrow cuts off at 16 bits.
        if not before < field <= MAX_FIELD:
            raise ThriftError(f"a structure has field {field} after field {before}")
        spec = form.get(field)
        if spec is None:
            if kind in BITS:  # as `_after` would: most fields are numbers
                while data[at] & 0x80:
                    at += 1
                at += 1
            else:
                at = _after(data, at, kind, depth=depth)
        elif kind != _type_of(spec):
            raise ThriftError(f"field {field} has type {kind}, and must have {_type_of(spec)}")
        else:
            wanted[field], at = _value(data, at, spec, depth=depth)
    return wanted, at + 1


def _type_of(spec: Any) -> int:
    if spec.__class__ is int:
        return spec
    return STRUCT if spec.__class__ is dict else LIST


def _value(data: bytes, at: int, spec: Any, *, depth: int) -> tuple[Any, int]:
    """Read a number, bytes, a structure or a list."""
    if spec.__class__ is dict:
        return read_structure(data, at, spec, depth=depth + 1)
    if spec.__class__ is not int:
        return _list(data, at, spec, depth=depth)
    if spec != BINARY:
        return _number(data, at, bits=BITS[spec])
    length, at = _varint(data, at, bits=32)
    if at + length > len(data):
        raise IndexError
    return data[at : at + length], at + length


def _list(data: bytes, at: int, spec: Any, *, depth: int) -> tuple[list[Any], int]:
    """Read a list. Its elements must have the form's type: Arrow does not look at the list's."""
    length, kind = data[at] >> 4, data[at] & 0x0F
    at += 1
    if length == LONG_LIST:
        length, at = _varint(data, at, bits=32)
    if length > len(data) - at:  # each element takes a byte
        raise IndexError
    (element,) = spec
    if length and kind != _type_of(element):
        raise ThriftError(f"a list has type {kind}, and must have {_type_of(element)}")
    if isinstance(spec, tuple):
        for _ in range(length):
            at = _after(data, at, kind, depth=depth)
        return [], at
    values = []
    for _ in range(length):
        value, at = _value(data, at, element, depth=depth)
        values.append(value)
    return values, at


def _after(data: bytes, at: int, kind: int, *, depth: int) -> int:
    """Return where a value ends that is passed over."""
    if kind in BITS:
        while data[at] & 0x80:
            at += 1
        return at + 1
    if kind == BINARY:
        length, at = _varint(data, at, bits=32)
        return at + length
    if kind == STRUCT:
        return read_structure(data, at, {}, depth=depth + 1)[1]
    if kind in (TRUE, FALSE):  # the type is the value
        return at
    if kind in (BYTE, DOUBLE):
        return at + (1 if kind == BYTE else 8)
    raise ThriftError(f"a field has type {kind}")


def _number(data: bytes, at: int, *, bits: int) -> tuple[int, int]:
    value, at = _varint(data, at, bits=bits)
    return (value >> 1) ^ -(value & 1), at  # its lowest bit is the sign


def _varint(data: bytes, at: int, *, bits: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, bits, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    else:
        raise ThriftError(f"a number has more than {bits} bits")
    if value >> bits:
        raise ThriftError(f"a number has more than {bits} bits")
    return value, at + 1
