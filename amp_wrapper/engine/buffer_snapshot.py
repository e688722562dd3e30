"""Buffers as they were before a step: what a skipped step restores.

One batch with NaN leaves NaN in BatchNorm's running statistics for good, although the optimizer step is skipped. So buffers are
copied when the first forward call since the last step begins, and the step selects between a buffer and its copy by the flag
that skips it: on the device, without a host read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import torch_internals
from ..casting.modules import is_batchnorm

#: Larger buffers (in bytes) are copied only if they ever change, after the first step: most are constant tables.
LARGE = 2**20
_FORM = operator.attrgetter('shape', 'dtype', 'device')
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferSnapshot:
    """The buffers of a model as they were when the first call since the last step began.

    A step of any optimizer of the training ends what has begun; a skipped one restores everything. NaN where there was none,
    and infinities in the statistics of norms, are restored in any case: calls may have left them of which no step comes.
    """

    def __init__(self) -> None:
        # by name: the buffers of the module that it belongs to, and its key there; and of each module, the names by key
        self._slots: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        self._names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
        self._of_norms: set[str] = set()
        # as last looked at: what there was, its shapes, and what of it can be copied
        self._seen: list[Tensor | None] = []
        self._shapes: list[torch.Size | None] = []
        self._tensors: dict[str, Tensor] = {}
        # large buffers and their versions when they were seen first, and those that are copied
        self._first: dict[str, tuple[Tensor, int]] = {}
        self._copied: set[str] = set()
        # by device, type, and whether they are statistics of norms
        self._groups: dict[tuple[Any, ...], _Group] = {}
        # whether the copies are those of the present step
        self._is_live = False
        # copies of a checkpoint, until the buffers are there that were saved with them
        self._loaded: dict[str, Tensor] = {}

    def add(self, model: nn.Module, prefix: str, leave: tuple[type, ...]) -> None:
        """Restore the buffers of a model from the next step on; of one that is known, those that have come since.

        Args:
            model: Not wrapped.
            prefix: Of the names of its buffers, in files.
            leave: Classes of modules to leave alone.
        """
        left = {each for module in model.modules() if isinstance(module, leave) for each in module.modules()}
        for name, module in model.named_modules(prefix=prefix):
            if module._buffers and module not in left and module not in self._names:
                names = self._names[module] = {key: f'{name}.{key}' if name else key for key in module._buffers}
                self._slots |= {name: (module._buffers, key) for key, name in names.items()}
                if isinstance(module, torch_internals.BatchOrInstanceNorm) or is_batchnorm(module):
                    self._of_norms.update(names.values())

    def __contains__(self, model: nn.Module) -> bool:
        return any(module in self._names for module in model.modules())

    def begin(self) -> None:
        """Copy the buffers, where this is the first forward call since the last step, or a graph that has one in it."""
        if self._is_live or not torch.is_grad_enabled() or torch_internals.in_function_transform():
            return
        self._is_live = True
        is_new = self._look()
        copied = {name for name, tensor in self._tensors.items() if tensor.nbytes > LARGE and self._may_change(name)}
        if is_new or copied != self._copied:
            self._copied, known = copied, self._groups
            kinds: defaultdict[tuple[Any, ...], dict[str, Tensor]] = defaultdict(dict)
            for name, tensor in self._tensors.items():
                if name in copied or tensor.nbytes <= LARGE:
                    kinds[tensor.device, tensor.dtype, name in self._of_norms][name] = tensor
            self._groups = {key: _Group.of(kind, key, known.get(key)) for key, kind in kinds.items()}
        for group in self._groups.values():
            group.copy()
        for name, copy in self._copies().items() if self._loaded else ():
            if name in self._loaded and self._loaded[name].shape == copy.shape:
                copy.copy_(self._loaded[name])
        self._loaded = {}

    def _look(self) -> bool:
        """Look where the buffers are. Whether there are others, or some have another shape, since the last look."""
        seen = [buffers.get(key) for buffers, key in self._slots.values()]
        shapes = [None if tensor is None else tensor.shape for tensor in seen]
        if shapes == self._shapes and all(map(operator.is_, seen, self._seen)):
            return False
        self._seen, self._shapes = seen, shapes
        self._tensors = {name: t for name, t in zip(self._slots, seen) if t is not None and _can_be_copied(t)}
        return True

    def _may_change(self, name: str) -> bool:
        """Look at a large buffer, once a step: whether it is new, or has ever changed."""
        tensor, is_new = self._tensors[name], name not in self._first
        first, version = self._first.setdefault(name, (tensor, tensor._version))
        return is_new or first is not tensor or version != tensor._version

    def settle(self, flag: Tensor | None) -> None:
        """End the step, taken or skipped. No host read.

        Args:
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        if self._loaded:
            with torch.enable_grad():
                self.begin()
        is_new = self._is_live and self._look()
        for group in self._groups.values() if self._is_live else ():
            if is_new:
                group.bind(self._tensors)
            group.restore(flag)
        if is_new:
            # what has another form now was left out
            self._shapes = []
        self._is_live = False

    def note_loaded(self, module: nn.Module, keys: Iterable[str]) -> None:
        """Copy buffers of a module that were loaded: this is what a skipped step restores."""
        names, copies = self._names.get(module, {}), self._copies()
        for key in keys:
            name, tensor = names.get(key, ''), module._buffers[key]
            # it is new
            self._first.pop(name, None)
            if tensor is not None and name in copies and copies[name].shape == tensor.shape:
                copies[name].copy_(tensor)

    def state(self) -> dict[str, Tensor]:
        """Clone the copies, by name, for a checkpoint in the middle of an accumulation; none where no step is under way."""
        return {name: copy.clone() for name, copy in (self._loaded or self._copies()).items()}

    def _copies(self) -> dict[str, Tensor]:
        return {name: c for group in self._groups.values() for name, c in group.copies.items()} if self._is_live else {}

    def load(self, copies: Mapping[str, Tensor]) -> None:
        """Go on with a step that was saved in the middle, before or after the model is loaded. Unknown names are left out."""
        self._is_live = False
        self._loaded = {name: copy.clone() for name, copy in copies.items()}


class _Group:
    """Buffers of one device and type. Their copies lie in one tensor, so that a selection is one operation.

    Args:
        shapes: Of each buffer, by name.
        device: Of all.
        dtype: Of all.
        is_norm: Whether they are statistics of norms.

    Attributes:
        shapes: As given.
        copies: What the buffers were, by name.
    """

    def __init__(self, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype, is_norm: bool) -> None:
        self.shapes, self._is_norm = shapes, is_norm
        self._has_nan = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
        # in one order: what they were, and room for what they have become
        size = sum(map(torch.Size.numel, shapes.values()))
        self._before, self._now = torch.zeros(2, size, dtype=dtype, device=device)
        self.copies, self._parts = self._by_name(self._before), self._by_name(self._now)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], key: tuple[Any, ...], known: _Group | None) -> _Group:
        """A group of these buffers: the known one, whose memory stays where it is, if they have its shapes."""
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        group = known if known is not None and known.shapes == shapes else cls(shapes, *key)
        group.bind(tensors)
        return group

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these for the buffers from now on; those that have another form are left alone."""
        there = [name for name in self.shapes if name in tensors and _FORM(tensors[name]) == _FORM(self.copies[name])]
        self._bound = [[each[name] for name in there] for each in (tensors, self.copies, self._parts)]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the buffers."""
        tensors, copies, _ = self._bound
        torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def restore(self, flag: Tensor | None) -> None:
        """Select between the buffers and their copies: these where the flag is up, and where numbers have been lost.

        Args:
            flag: As for :meth:`BufferSnapshot.settle`.
        """
        before, now = self._before, self._now
        back = None if flag is None else flag.to(now.device) > 0
        tensors, _, parts = self._bound
        if not tensors or (back is None and not self._has_nan):
            return
        torch._foreach_copy_(parts, tensors)
        if self._has_nan:
            lost = before.isfinite() & ~now.isfinite() if self._is_norm else now.isnan() & ~before.isnan()
            back = lost if back is None else back | lost
        # by bits: there are types that cannot be selected
        bits = _BITS.get(now.element_size(), now.dtype)
        before, now = before.view(bits), now.view(bits)
        torch.where(back, before, now, out=now)  # type: ignore[arg-type]
        # through ``data``: graphs that wait for their backward pass may hold buffers, and none computes with what is written
        torch._foreach_copy_(list(map(operator.attrgetter('data'), tensors)), parts)


def _can_be_copied(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and written back at all; subclasses have rules of their own."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel() > 0
    is_odd = tensor.is_meta or tensor.is_inference() or tensor.is_quantized
    return is_plain and not is_odd and torch_internals.internal_overlap(tensor) != 1
