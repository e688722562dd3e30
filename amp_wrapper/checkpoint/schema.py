"""Schemas of saved data: small descriptions that are composed, and one typed error for all of them.

Example::

    POSITION = Record({'epoch': whole(), 'iter': whole()}, optional={'seed': Maybe(whole())})
    POSITION.check(file['meta'], 'meta')  # AmpCheckpointError: meta['epoch']=-1 must be a whole number of at least 0 ...

An error names the path of the key, the value where it is short, and what was expected there: the first problem found.
Values are of the types that torch, mmengine and NumPy write; nothing is converted and nothing is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import AmpCheckpointError, some
from ..policy.options import is_number

#: Longer values are not shown in messages.
_SHOWN = 500


class Schema:
    """A description of saved data; this one takes anything."""

    def check(self, value: Any, path: str, show: bool = True) -> None:
        """Look at a value, and change nothing.

        Args:
            value: From a file.
            path: How messages call it; keys inside follow in brackets.
            show: Whether messages show values.

        Raises:
            AmpCheckpointError: Names the key, the value and what was expected.
        """

    def fits(self, value: Any) -> bool:
        """Whether a value is as described."""
        try:
            self.check(value, '', show=False)
        except AmpCheckpointError:
            return False
        return True


ANYTHING = Schema()


@dataclass(frozen=True)
class Is(Schema):
    """A value that a function accepts.

    Attributes:
        expected: In words.
        accepts: The function.
        text: A whole message in place of the usual one, with ``{path}`` and ``{value}`` in it.
    """

    expected: str
    accepts: Callable[[Any], bool]
    text: str = ''

    def check(self, value: Any, path: str, show: bool = True) -> None:
        if not self.accepts(value):
            raise _error(path, value, self.expected, show, self.text)


@dataclass(frozen=True)
class Maybe(Schema):
    """None, or what another schema describes."""

    schema: Schema

    def check(self, value: Any, path: str, show: bool = True) -> None:
        if value is not None:
            self.schema.check(value, path, show)


@dataclass(frozen=True)
class Both(Schema):
    """What two schemas describe; the second may rest on the first."""

    first: Schema
    second: Schema

    def check(self, value: Any, path: str, show: bool = True) -> None:
        self.first.check(value, path, show)
        self.second.check(value, path, show)


@dataclass(frozen=True)
class ListOf(Schema):
    """A list or tuple.

    Attributes:
        item: Of each entry.
        expected: In words.
        length: The number of entries, or None for any.
        least: The smallest number of entries.
    """

    item: Schema = ANYTHING
    expected: str = 'a list'
    length: int | None = None
    least: int = 0

    def check(self, value: Any, path: str, show: bool = True) -> None:
        _check_type(path, value, (list, tuple), self.expected)
        if len(value) < self.least or self.length not in (None, len(value)):
            found = f'has {len(value)} entries' if value else 'is empty'
            raise AmpCheckpointError(f'{path} must be {self.expected}, but {found}: the file is damaged.')
        for index, item in enumerate(value):
            self.item.check(item, f'{path}[{index}]', show)


@dataclass(frozen=True)
class MapOf(Schema):
    """A dict of any keys.

    Attributes:
        item: Of each value.
        expected: In words.
        names: Whether the keys are names.
    """

    item: Schema = ANYTHING
    expected: str = 'a dict'
    names: bool = False

    def check(self, value: Any, path: str, show: bool = True) -> None:
        _check_type(path, value, Mapping, self.expected)
        odd = [key for key in value if self.names and not isinstance(key, str)]
        if odd:
            raise AmpCheckpointError(f'{path} has the key {odd[0]!r}, which is no name: the file is damaged.')
        for key, item in value.items():
            self.item.check(item, _inside(path, key), show)


@dataclass(frozen=True)
class Record(Schema):
    """A dict of known keys; it may have others beside them.

    Attributes:
        required: What lies under the keys that must be there. One that is not there counts as None.
        optional: Likewise, of those that need not be there.
        missing: In place of that, the message where required keys are missing, with ``{path}``, ``{keys}`` for
            them, ``{first}`` for the first of them, and ``{found}`` for those in it.
        unknown: The message for keys that are neither, likewise; without it, they may be there.
    """

    required: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)
    missing: str = ''
    unknown: str = ''

    def check(self, value: Any, path: str, show: bool = True) -> None:
        _check_type(path, value, Mapping, 'a dict')
        lost = [key for key in self.required if key not in value]
        extra = [key for key in value if key not in self.required and key not in self.optional]
        for keys, text in ((lost, self.missing), (extra, self.unknown)):
            if keys and text:
                found = some(value, 16) or 'nothing'
                raise AmpCheckpointError(text.format(path=path, keys=some(keys, 4, repr), first=keys[0], found=found))
        for key, schema in {**self.required, **self.optional}.items():
            if key in value or key in self.required:
                schema.check(value.get(key), _inside(path, key), show)


@dataclass(frozen=True)
class TensorOf(Schema):
    """A tensor that can be copied, and written to in place.

    Attributes:
        shape: Its shape, or None for any.
        owner: Whose shape that is, in words.
        remedy: What a message about the shape ends with.
        dense: False where sparse and expanded tensors, those of the meta device and quantized ones will do, too.
        floating: Whether its numbers are floating or complex.
    """

    shape: torch.Size | None = None
    owner: str = 'its parameter'
    remedy: str = '.'
    dense: bool = True
    floating: bool = False

    def check(self, value: Any, path: str, show: bool = True) -> None:
        expected = 'a floating tensor' if self.floating else 'a tensor'
        _check_type(path, value, Tensor, expected)
        text = ''
        if self.dense and not is_dense(value):
            text = f'is no plain tensor ({value.layout}, on {value.device}): the file is damaged.'
        elif self.shape not in (None, value.shape):
            text = f'has shape {tuple(value.shape)}, but {self.owner} {tuple(self.shape or ())}{self.remedy}'
        elif self.floating and not (value.is_floating_point() or value.is_complex()):
            text = f'must be {expected}, but is {value.dtype}: the file is damaged.'
        if text:
            raise AmpCheckpointError(f'{path} {text}')


def is_dense(value: Tensor) -> bool:
    """Whether each element of a tensor has a place of its own in memory."""
    strided = value.layout is torch.strided and not value.is_meta and not value.is_quantized
    return strided and not any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape))


def _check_type(path: str, value: Any, types: Any, expected: str) -> None:
    if not isinstance(value, types):
        raise AmpCheckpointError(f'{path} must be {expected}, but is {type(value).__name__}: the file is damaged.')


def _inside(path: str, key: Any) -> str:
    return f'{path}[{key!r}]' if path else repr(key)


def _error(path: str, value: Any, expected: str, show: bool, text: str) -> AmpCheckpointError:
    if text:
        return AmpCheckpointError(text.format(path=path, value=value))
    shown = repr(value) if show else ''
    if show and len(shown) <= _SHOWN:
        return AmpCheckpointError(f'{path}={shown} must be {expected}.')
    return AmpCheckpointError(f'{path} must be {expected}: the file is damaged.')


# -- names, numbers and switches ----------------------------------------------------------------------------------------


def named(expected: str, schema: Schema) -> Is:
    """What a schema describes; whatever is wrong inside, a message names the whole."""
    return Is(expected, schema.fits)


def kind(expected: str, *types: Any) -> Is:
    """A value of one of these types."""
    return Is(expected, lambda value: isinstance(value, types))


def exactly(expected: Any) -> Is:
    """This value, of this type."""
    return Is(repr(expected), lambda value: type(value) is type(expected) and value == expected)


def whole(least: int = 0, bits: int | None = 63, types: Any = int) -> Is:
    """A whole number of a type, of at least ``least`` and below 2**bits."""
    limit = math.inf if bits is None else 2**bits
    words = f'a whole number of at least {least}' + ('' if bits is None else f' and below 2**{bits}')
    return Is(words, lambda value: isinstance(value, types) and not isinstance(value, bool) and least <= value < limit)


def between(least: int, most: int) -> Is:
    """A whole number from ``least`` to ``most``."""
    return Is(f'a whole number from {least} to {most}', lambda value: whole(least).fits(value) and value <= most)


def version(newest: int) -> Schema:
    """The version of a format, of which those up to ``newest`` can be read."""
    later = f'{{path}}={{value}} comes from a newer amp_wrapper; this one reads up to {newest}: upgrade it.'
    first = Is(f'a whole number from 1 to {newest}', whole(1, bits=None).accepts)
    return Both(first, Is('', lambda value: value <= newest, later))


def number_in(value: Any) -> Any:
    """The number inside a tensor or an array of one element; anything else as it is. Syncs for a tensor on a device."""
    if isinstance(value, Tensor):
        single = value.numel() == 1 and value.layout is torch.strided and not value.is_meta and not value.is_complex()
        return value.item() if single else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def _number(expected: str, accepts: Callable[[Any], bool] = lambda value: True) -> Is:
    """A real number, plain or in a tensor or array of one element; it may be infinite, but is neither NaN nor a boolean."""

    def takes(value: Any) -> bool:
        value = number_in(value)
        try:
            return is_number(value) and not math.isnan(value) and accepts(value)
        except OverflowError:
            # a whole number beyond float64
            return False

    return Is(expected, takes)


def _fits_float32(value: Any) -> bool:
    return bool(abs(value) < (2**63 if isinstance(value, int) else 3e38))


REAL = _number('a number')
#: A number that float32 can hold, and the device's whole numbers where it is whole.
SETTING = _number('a number', _fits_float32)
NOT_NEGATIVE = _number('a number of at least 0', lambda value: _fits_float32(value) and value >= 0)
#: A counter of a schedule, of any type; it begins at -1.
COUNTER = _number(
    'a whole number of at least -1', lambda value: math.isfinite(value) and float(value).is_integer() and value >= -1
)
POSITIVE = Is(
    'a positive finite number that float32 can hold',
    lambda value: is_number(value) and torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max,
)
FINITE = Is('a number', lambda value: is_number(value) and abs(value) <= torch.finfo(torch.float64).max)
FLAG = Is('0 or 1', lambda value: is_number(value) and value in (0, 1))
SWITCH = kind('True or False', bool)
#: A switch that may be left to the optimizer.
CHOICE = Is('True, False or None', lambda value: value is None or isinstance(value, (bool, np.bool_)))
TENSOR = kind('a tensor', Tensor)
