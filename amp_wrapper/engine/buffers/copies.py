"""Copies of buffers, and the choice by a flag between a buffer and its copy: for any dtype, bit for bit, on the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import ops

_ALIGNMENT = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferGroup:
    """Small buffers of one device and type: their copies lie in one tensor, and so does what a step writes back.

    Args:
        places: Of the buffers.
        tensors: The buffers.
        modules: The number of the module that each belongs to.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], modules: Sequence[int]) -> None:
        self.places = places
        #: The buffers, unseen by autograd: graphs of passes that wait for their backward may hold them (a generator's, while
        #: the discriminator takes its step), and none computes with what is written here.
        self.tensors = [tensor.data for tensor in tensors]
        # one call for all of them, where no two may be views of one another; torch's own loops over them on a CPU
        apart = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        kind, device = tensors[0].dtype, tensors[0].device
        self._compiled = apart and kind in ops.COMPILED_DTYPES and ops.backend_of(device) != 'reference'
        size = tensors[0].element_size()
        step = max(_ALIGNMENT // size, 1)
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.numel() // step) * step)
        # zeros: the gaps are selected too
        self._copies = torch.zeros(starts[-1], dtype=tensors[0].dtype, device=tensors[0].device)
        self._results = torch.zeros_like(self._copies)
        # as after the last pass but one: made where a step has several passes
        self._sound: Tensor | None = None
        self._is_first = True
        self.copies = [_like(self._copies, start, tensor) for start, tensor in zip(starts, tensors)]
        self._results_of = [_like(self._results, start, tensor) for start, tensor in zip(starts, tensors)]
        self._sound_of: list[Tensor] = []
        self._starts = starts
        self._knows_nan = has_nan(kind)
        self._ends = torch.tensor(starts[1:], device=device) - 1
        self._lengths = torch.tensor([end - start for start, end in itertools.pairwise(starts)], device=device)
        self._modules = torch.tensor(list(modules), device=device)

    @property
    def device(self) -> torch.device:
        return self._copies.device

    def take(self) -> None:
        """Copy the buffers: a step begins."""
        self._copy(self.tensors, self.copies)
        self._is_first = True

    def go_on(self) -> None:
        """Another pass of the same step begins; the ones before have left no NaN that stands."""
        if self._sound is None:
            self._sound = torch.zeros_like(self._copies)
            self._sound_of = [_like(self._sound, start, tensor) for start, tensor in zip(self._starts, self.tensors)]
        self._copy(self.tensors, self._sound_of)
        self._is_first = False

    def read(self, chosen: Sequence[int] | None = None) -> None:
        """Look at the buffers; before :meth:`mark` and :meth:`select`.

        Args:
            chosen: Indices into ``places``; None for all.
        """
        tensors, results = self.tensors, self._results_of
        if chosen is not None:
            self._results.zero_()
            tensors, results = [tensors[index] for index in chosen], [results[index] for index in chosen]
        self._copy(tensors, results)

    def _before(self) -> Tensor:
        return self._copies if self._is_first or self._sound is None else self._sound

    def mark(self, marks: Tensor) -> bool:
        """Count the NaN that the last pass has left, by module. No host read.

        Args:
            marks: Whole numbers, by number of the module; added to.

        Returns:
            Whether there can be any in buffers of this type.
        """
        if self._knows_nan:
            counts = (self._results.isnan() & ~self._before().isnan()).cumsum(0)[self._ends]
            marks.index_add_(0, self._modules, counts.diff(prepend=counts.new_zeros(1)))
        return self._knows_nan

    def select(
        self, flag: Tensor | None, marks: Tensor | None, chosen: Sequence[int] | None = None
    ) -> Callable[[], None]:
        """What the buffers will be; the returned function writes it to them.

        Args:
            flag: Scalar; the copies where it is not zero. None for one that is zero.
            marks: From :meth:`mark` of all groups; what there was before the last pass where it is not zero. None for zeros.
            chosen: As for :meth:`read`.
        """
        copies, now, before = (_bits_of(flat) for flat in (self._copies, self._results, self._before()))
        # by bits, so that nothing of a NaN gets through
        if marks is not None:
            marked = marks[self._modules] > 0
            marked = torch.repeat_interleave(marked, self._lengths, output_size=len(self._results))
            torch.where(marked, before, now, out=now)
        if flag is not None:
            torch.where(flag.to(now.device) > 0, copies, now, out=now)
        tensors, results = self.tensors, self._results_of
        if chosen is not None:
            tensors, results = [tensors[index] for index in chosen], [results[index] for index in chosen]
        return functools.partial(self._copy, results, tensors)

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        if self._compiled:
            ops.multi_tensor_copy(sources, targets)
        else:
            torch._foreach_copy_(targets, sources)


def _bits_of(flat: Tensor) -> Tensor:
    bits = _BITS.get(flat.element_size())
    return flat if bits is None else flat.view(bits)


def has_nan(dtype: torch.dtype) -> bool:
    """Whether torch can tell NaN of this type."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def new_nan(tensor: Tensor, before: Tensor) -> Tensor:
    """Bool scalar: whether there is NaN where there was none."""
    if not has_nan(tensor.dtype):
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor.isnan() & ~before.isnan()).any()


def _like(flat: Tensor, start: int, tensor: Tensor) -> Tensor:
    """A part of ``flat`` with the shape of ``tensor``, and its order of elements where that has no gaps."""
    part = flat[start : start + tensor.numel()]
    if torch._debug_has_internal_overlap(tensor) == 0:
        return part.as_strided(tensor.shape, tensor.stride(), start)
    return part.view(tensor.shape)


def is_tracked(tensor: Tensor | None) -> bool:
    """Whether a buffer can be copied and written back at all."""
    return (
        # subclasses have rules of their own: lazy, fake, sharded tensors
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_inference() or tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
        and torch._debug_has_internal_overlap(tensor) != 1
    )


def form_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def selected(copy: Tensor, tensor: Tensor, flag: Tensor) -> Tensor:
    """The copy where the flag is up, the tensor otherwise: a selection by bits, so that nothing of a NaN gets through."""
    flag = flag.to(tensor.device) > 0
    bits = _BITS.get(tensor.element_size())
    if bits is None:
        return torch.where(flag, copy, tensor)
    return torch.where(flag, copy.view(bits), tensor.detach().view(bits)).view(tensor.dtype)


def same_bits(copy: Tensor, tensor: Tensor | None) -> bool:
    if tensor is None or form_of(tensor) != form_of(copy):
        return False
    bits = _BITS.get(copy.element_size())
    tensor = tensor.detach()
    return copy.equal(tensor) if bits is None else copy.view(bits).equal(tensor.view(bits))


__all__ = ['BufferGroup', 'form_of', 'has_nan', 'is_tracked', 'new_nan', 'same_bits', 'selected']
