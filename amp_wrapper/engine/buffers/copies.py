"""Copies of buffers, and the choice by a flag between a buffer and its copy: for any dtype, bit for bit, on the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ... import ops
from ...torch_internals import internal_overlap

#: Larger buffers (in bytes) are copied only after their version counter has moved; one that never moves has no copy.
LARGE = 2**20
_ALIGNMENT = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferGroup:
    """Small buffers of one device and type: their copies lie in one tensor, and so does what a step writes back.

    Args:
        tensors: The buffers.
        modules: The number of the module that each belongs to.
    """

    def __init__(self, tensors: Sequence[Tensor], modules: Sequence[int]) -> None:
        # unseen by autograd: graphs that wait for their backward pass may hold buffers (a generator's, while the discriminator
        # takes its step), and none computes with what is written here
        self._tensors = [tensor.data for tensor in tensors]
        dtype, self.device = tensors[0].dtype, tensors[0].device
        self.has_nan = has_nan(dtype)
        # one call for all of them, where no two may be views of one another; torch's own loops over them on a CPU
        apart = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        compiled = apart and dtype in ops.COMPILED_DTYPES and ops.backend_of(self.device) != 'reference'
        self._copy = ops.multi_tensor_copy if compiled else _copy_each
        step = max(_ALIGNMENT // tensors[0].element_size(), 1)
        self._starts = [0, *itertools.accumulate(-(-tensor.numel() // step) * step for tensor in tensors)]
        # zeros: the gaps are selected too
        self._first, self.copies = self._room()
        self._now, self._now_of = self._room()
        # as before the last forward call; room is made for it where a step has several
        self._last: Tensor | None = None
        self._last_of: list[Tensor] = []
        self._has_several = False
        self._ends = torch.tensor(self._starts[1:], device=self.device) - 1
        lengths = [end - start for start, end in itertools.pairwise(self._starts)]
        self._lengths = torch.tensor(lengths, device=self.device)
        self._modules = torch.tensor(list(modules), device=self.device)

    @torch.inference_mode(False)
    def _room(self) -> tuple[Tensor, list[Tensor]]:
        """Zeros for all buffers, and the part of each in its shape."""
        flat = torch.zeros(self._starts[-1], dtype=self._tensors[0].dtype, device=self.device)
        parts = [flat[start : start + tensor.numel()] for start, tensor in zip(self._starts, self._tensors)]
        return flat, [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors)]

    def bind(self, index: int, tensor: Tensor | None) -> None:
        """From now on this is the buffer; None for one that is to be left alone."""
        self._tensors[index] = self.copies[index] if tensor is None else tensor.data

    def take(self) -> None:
        """Copy the buffers: a step begins."""
        self._copy(self._tensors, self.copies)
        self._has_several = False

    def go_on(self) -> None:
        """Another forward call of the same step begins; the ones before have left no NaN that stands."""
        if self._last is None:
            self._last, self._last_of = self._room()
        self._copy(self._tensors, self._last_of)
        self._has_several = True

    def accept(self, index: int, keeps_nan: bool) -> bool:
        """What was written to a buffer stays. Whether that is possible.

        Args:
            index: Of the buffer.
            keeps_nan: Whether new NaN stays, too.
        """
        for copies in (self.copies, self._last_of) if self._has_several else (self.copies,):
            _accept(copies[index], self._tensors[index], keeps_nan)
        return True

    def read(self, marks: Tensor | None) -> None:
        """Look at the buffers, and count the NaN that the last forward call has left, by module. No host read.

        Args:
            marks: Whole numbers, by number of the module; added to. None where no buffer of the device can hold NaN.
        """
        self._copy(self._tensors, self._now_of)
        if self.has_nan and marks is not None:
            counts = (self._now.isnan() & ~self._before().isnan()).cumsum(0)[self._ends]
            marks.index_add_(0, self._modules, counts.diff(prepend=counts.new_zeros(1)))

    def select(self, flag: Tensor | None, marks: Tensor | None) -> Callable[[], object]:
        """What the buffers will be; the returned function writes it to them.

        Args:
            flag: Scalar; the copies of the step's beginning where it is not zero. None for one that is zero.
            marks: What there was before the last forward call where the number of the module is not zero. None for zeros.
        """
        # by bits, so that nothing of a NaN gets through
        now = _bits_of(self._now)
        if marks is not None:
            marked = torch.repeat_interleave(marks[self._modules] > 0, self._lengths, output_size=len(now))
            torch.where(marked, _bits_of(self._before()), now, out=now)
        if flag is not None:
            torch.where(flag.to(self.device) > 0, _bits_of(self._first), now, out=now)
        return functools.partial(self._copy, self._now_of, self._tensors)

    def _before(self) -> Tensor:
        return self._last if self._has_several and self._last is not None else self._first


class LargeBuffer:
    """A buffer that is copied only after its version has moved; one that seems constant has no copy.

    Args:
        tensor: The buffer.
        module: The number of the module that it belongs to.
    """

    def __init__(self, tensor: Tensor, module: int) -> None:
        self._tensor: Tensor | None = tensor
        self._module = module
        self.device = tensor.device
        self.has_nan = has_nan(tensor.dtype)
        self.copies: list[Tensor | None] = [None]
        # the version of what was copied
        self._copied = -1
        self._found: tuple[Tensor, Tensor] | None = None

    def bind(self, index: int, tensor: Tensor | None) -> None:
        """As of :class:`BufferGroup`, and so are the others."""
        self._tensor, self._copied = tensor, -1

    def take(self) -> None:
        """Copy the buffer, if it has moved."""
        assert self._tensor is not None
        if self._copied == self._tensor._version:
            return
        with torch.inference_mode(False):
            copy = self.copies[0] = torch.empty_like(self._tensor) if self.copies[0] is None else self.copies[0]
            copy.copy_(self._tensor.data)
        self._copied = self._tensor._version

    def go_on(self) -> None:
        """Large buffers are copied once in a step."""

    def accept(self, index: int, keeps_nan: bool) -> bool:
        """What was written to the buffer stays, where there is a copy."""
        copy = self.copies[0]
        if copy is None or self._tensor is None:
            return False
        _accept(copy, self._tensor.data, keeps_nan)
        self._copied = self._tensor._version
        return True

    def read(self, marks: Tensor | None) -> None:
        """Look at the buffer, if it has moved."""
        copy, tensor = self.copies[0], self._tensor
        self._found = None
        if copy is None or tensor is None or tensor._version == self._copied:
            return
        self._found = copy, tensor.data
        if self.has_nan and marks is not None:
            marks[self._module] += new_nan(tensor.data, copy)

    def select(self, flag: Tensor | None, marks: Tensor | None) -> Callable[[], object]:
        """What the buffer will be; the returned function writes it."""
        up = [number > 0 for number in (flag, None if marks is None else marks[self._module]) if number is not None]
        if self._found is None or not up:
            return _nothing
        copy, tensor = self._found
        back = functools.reduce(torch.logical_or, [each.to(tensor.device) for each in up])
        return functools.partial(tensor.copy_, selected(copy, tensor, back))

    def close(self) -> None:
        """The step is over: what has not moved in it is not kept twice."""
        if self._tensor is not None and self._copied == self._tensor._version:
            self.copies[0] = None


def write_back(
    parts: Sequence[BufferGroup | LargeBuffer], flag: Tensor | None, marks: Mapping[torch.device, Tensor]
) -> None:
    """Let buffers become what :meth:`BufferGroup.select` says.

    Args:
        parts: All that may share memory.
        flag: Scalar, or None.
        marks: By device: zeros, by number of the module; changed.
    """
    for part in parts:
        part.read(marks.get(part.device))
    # all is read before anything is written: buffers may be views of one another
    for write in [part.select(flag, marks.get(part.device)) for part in parts]:
        write()


def _nothing() -> None:
    """Writes nothing."""


def _copy_each(sources: list[Tensor], targets: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def _accept(copy: Tensor, tensor: Tensor, keeps_nan: bool) -> None:
    copy.copy_(tensor if keeps_nan else selected(copy, tensor, new_nan(tensor, copy)))


def _bits_of(tensor: Tensor) -> Tensor:
    bits = _BITS.get(tensor.element_size())
    return tensor if bits is None else tensor.view(bits)


def has_nan(dtype: torch.dtype) -> bool:
    """Whether a tensor of this type can hold NaN, and ``isnan`` works for it."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def new_nan(tensor: Tensor, before: Tensor) -> Tensor:
    """Bool scalar: whether there is NaN where there was none."""
    if not has_nan(tensor.dtype):
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor.isnan() & ~before.isnan()).any()


def is_tracked(tensor: Tensor | None) -> bool:
    """Whether a buffer can be copied and written back at all."""
    return (
        # subclasses have rules of their own: lazy, fake, sharded tensors
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_inference() or tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
        and internal_overlap(tensor) != 1
    )


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """What a tensor and its copy have in common."""
    return tensor.dtype, tensor.device, tensor.shape


def selected(copy: Tensor, tensor: Tensor, flag: Tensor) -> Tensor:
    """The copy where the flag is up, the tensor otherwise: a selection by bits, so that nothing of a NaN gets through."""
    return torch.where(flag.to(tensor.device) > 0, _bits_of(copy), _bits_of(tensor.detach())).view(tensor.dtype)


def same_bits(copy: Tensor, tensor: Tensor | None) -> bool:
    """Whether both are of one form, and equal bit for bit. Syncs."""
    if tensor is None or form_of(tensor) != form_of(copy):
        return False
    return _bits_of(copy).equal(_bits_of(tensor.detach()))
