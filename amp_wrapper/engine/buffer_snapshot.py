"""Buffers as they were before a step: what a skipped step restores.

One batch with NaN leaves NaN in BatchNorm's running statistics for good, although the optimizer step is skipped. So buffers are
copied when the first forward call since the last step begins, and the step selects between a buffer and its copy by the flag
that skips it: on the device, without a host read.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import ops, torch_internals
from ..casting.modules import is_batchnorm
from ..ops import attributes

#: Larger buffers (in bytes) are copied only if they ever change, after the first step: most are constant tables.
LARGE = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BufferSnapshot:
    """The buffers of a model as they were when the first call since the last step began.

    A step of any optimizer of the training ends what has begun; a skipped one restores everything. NaN where there was none,
    and infinities in the statistics of norms, are restored in any case: calls may have left them of which no step comes.
    """

    def __init__(self) -> None:
        # by name: the buffers of the module that it belongs to, and its key there
        self._slots: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        self._names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
        self._of_norms: set[str] = set()
        # as last looked at: what there was, what of it can be copied, and where that lay
        self._seen: list[Tensor | None] = []
        self._tensors: dict[str, Tensor] = {}
        self._addresses: list[int] = []
        # large buffers and their versions, as last looked at; those that have ever changed, and those that are copied
        self._marks: dict[str, tuple[Tensor, int]] = {}
        self._moved: set[str] = set()
        self._copied: set[str] = set()
        self._groups: list[_Group] = []
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
        """A forward call begins, or a graph that has one in it; the first one since the last step copies."""
        if self._is_live or not torch.is_grad_enabled() or torch_internals.in_function_transform():
            return
        self._is_live = True
        known = set(self._marks)
        is_new = self._look()
        copied = {name for name in self._marks if name in self._moved or name not in known}
        if is_new or copied != self._copied:
            self._copied = copied
            self._group()
        for group in self._groups:
            group.copy(self._loaded)
        self._loaded = {}

    def _look(self) -> bool:
        """Look where the buffers are. Whether there are others, or some lie elsewhere, since the last look."""
        seen, before = [buffers.get(key) for buffers, key in self._slots.values()], self._addresses
        is_new = not attributes.same(seen, self._seen)
        if is_new:
            self._seen = seen
            self._tensors = {n: t for n, t in zip(self._slots, seen) if t is not None and _can_be_copied(t)}
            large = [name for name, tensor in self._tensors.items() if tensor.nbytes > LARGE]
            self._marks = {
                name: self._marks.get(name, (self._tensors[name], self._tensors[name]._version)) for name in large
            }
        for name, (tensor, version) in self._marks.items():
            now = self._tensors[name]
            if now is not tensor or now._version != version:
                self._moved.add(name)
                self._marks[name] = now, now._version
        self._addresses = attributes.addresses(list(self._tensors.values()))
        return is_new or self._addresses != before

    def _group(self) -> None:
        kinds: defaultdict[tuple[torch.device, torch.dtype, bool], dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in self._tensors.items():
            if name in self._copied or name not in self._marks:
                kinds[tensor.device, tensor.dtype, name in self._of_norms][name] = tensor
        known = {tuple(group.form.items()): group for group in self._groups}
        self._groups = []
        for (*_, is_norm), kind in kinds.items():
            form = {name: _form(tensor) for name, tensor in kind.items()}
            self._groups.append(known.get(tuple(form.items())) or _Group(form, is_norm))
            self._groups[-1].bind(kind)

    def settle(self, flag: Tensor | None) -> None:
        """A step is taken or skipped. No host read.

        Args:
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        if self._loaded:
            with torch.enable_grad():
                self.begin()
        if self._is_live:
            is_new = self._look()
            for group in self._groups:
                if is_new:
                    group.bind(self._tensors)
                group.restore(flag)
            if is_new:
                # what has another form now was left out
                self._seen = []
        self._is_live = False

    def note_loaded(self, module: nn.Module, keys: Iterable[str]) -> None:
        """Copy buffers of a module that were loaded: this is what a skipped step restores."""
        names, copies = self._names.get(module, {}), dict(self._copies())
        for name in [names[key] for key in keys if key in names]:
            tensor, copy = module._buffers[self._slots[name][1]], copies.get(name)
            if tensor is not None and name in self._marks:
                self._marks[name] = tensor, tensor._version
            if tensor is not None and copy is not None and tensor.shape == copy.shape:
                copy.copy_(tensor)

    def state(self) -> dict[str, Tensor]:
        """The copies by name, for a checkpoint in the middle of an accumulation; empty where no step is under way."""
        return {name: copy.clone() for name, copy in (self._loaded.items() or self._copies())}

    def _copies(self) -> Iterable[tuple[str, Tensor]]:
        return [pair for group in self._groups for pair in zip(group.form, group.copies)] if self._is_live else []

    def load(self, copies: Mapping[str, Tensor]) -> None:
        """Go on with a step that was saved in the middle, before or after the model is loaded. Unknown names are left out."""
        self._is_live = False
        self._loaded = {name: copy.clone() for name, copy in copies.items()}


class _Group:
    """Buffers of one device and type. Their copies lie in one tensor, so that a selection is one operation.

    Args:
        form: Of each buffer, by name.
        is_norm: Whether they are statistics of norms.
    """

    def __init__(self, form: Mapping[str, tuple[Any, ...]], is_norm: bool) -> None:
        self.form, self._is_norm = form, is_norm
        self._before, self.copies = _room(form)
        self._now, self._parts = _room(form)
        dtype = self._before.dtype
        self._has_nan = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
        # of those that can be copied and restored, in one order: themselves, their copies, and room for what they become
        self._bound: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """These are the buffers from now on. Those that have another form are left alone.

        Through ``.data``: graphs that wait for their backward pass may hold buffers, and none computes with what is written.
        """
        found = [
            (tensors[name].data, copy, part)
            for (name, form), copy, part in zip(self.form.items(), self.copies, self._parts)
            if name in tensors and _form(tensors[name]) == form
        ]
        self._bound = tuple(map(list, zip(*found))) if found else ([], [], [])  # type: ignore[assignment]

    @torch.no_grad()
    def copy(self, loaded: Mapping[str, Tensor]) -> None:
        """Copy the buffers, but for those of which a checkpoint has the copy."""
        tensors, copies, _ = self._bound
        ops.multi_tensor_copy(tensors, copies)
        for name, copy in zip(self.form, self.copies) if loaded else ():
            if name in loaded and loaded[name].shape == copy.shape:
                copy.copy_(loaded[name])

    @torch.no_grad()
    def restore(self, flag: Tensor | None) -> None:
        """Select between the buffers and their copies: these where the flag is up, and where numbers have been lost."""
        tensors, _, parts = self._bound
        back = None if flag is None else flag.to(self._now.device) > 0
        if back is None and not self._has_nan:
            return
        ops.multi_tensor_copy(tensors, parts)
        if self._has_nan:
            now, before = self._now, self._before
            lost = before.isfinite() & ~now.isfinite() if self._is_norm else now.isnan() & ~before.isnan()
            back = lost if back is None else back | lost
        # by bits: there are types that cannot be selected
        bits = _BITS.get(self._now.element_size(), self._now.dtype)
        before, now = self._before.view(bits), self._now.view(bits)
        torch.where(back, before, now, out=now)  # type: ignore[arg-type]
        ops.multi_tensor_copy(parts, tensors)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _room(form: Mapping[str, tuple[Any, ...]]) -> tuple[Tensor, list[Tensor]]:
    """Zeros for some tensors of one type and device, and the part of each in its shape."""
    shapes = [shape for shape, _, _ in form.values()]
    _, dtype, device = next(iter(form.values()))
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    flat = torch.zeros(ends[-1], dtype=dtype, device=device)
    return flat, [flat[start:end].view(shape) for shape, (start, end) in zip(shapes, itertools.pairwise(ends))]


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor can be copied and written back at all; subclasses have rules of their own."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_meta or tensor.is_inference() or tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
        and torch_internals.internal_overlap(tensor) != 1
    )
