"""Arguments of a call in another type, and the way back of what is written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import graph_internals
from ..compiler_internals import constant_when_traced
from .nested import CASTABLE, HALF_TYPES, Rebuilt, has_to_cast, held_by, key_in, map_in_graph, map_tensors

# the attribute of a 16-bit copy with what it was made of, and its version then
_ORIGINAL = '_amp_wrapper_original'


class Copies:
    """Arguments of one call in another type. What the callee writes to them reaches the caller's objects afterwards.

    Tensors, lists, dicts and dataclasses that are given several times stay one object.

    Args:
        target: The type.
        sources: The types that are cast; everything else is left alone.
        within: In a graph, the copies of calls around this one: what is a copy of theirs is cast from the original. Elsewhere
            copies know their originals.
    """

    def __init__(
        self,
        target: torch.dtype,
        sources: frozenset[torch.dtype] = CASTABLE,
        within: Sequence[Copies] = (),
    ) -> None:
        self.target, self._sources, self._within = target, sources, within
        # by the id of a tensor, in graphs by number: itself, its copy, and by what to see whether that was written to
        self._tensors: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._rebuilt: Rebuilt = {}

    def cast(self, value: Any) -> Any:
        """``value``, any nesting, with copies of the tensors that have to be cast; itself where there are none."""
        if torch.compiler.is_dynamo_compiling():
            needed = has_to_cast(value, self.target, self._sources, None)
            return map_in_graph(self._cast, value, None, self._rebuilt) if needed else value
        return map_tensors(self._cast, value, rebuilt=self._rebuilt)

    def _cast(self, tensor: Tensor) -> Tensor:
        # the comparison is cheaper than the set lookup, and most tensors have the type already
        if tensor.dtype is self.target or tensor.dtype not in self._sources:
            return tensor
        known = self._known(tensor)
        if known is None:
            exact = self._exact(tensor)
            if exact.dtype is self.target:
                known = (tensor, exact, None if torch.compiler.is_dynamo_compiling() else _version(exact))
            else:
                made = self._copy(exact)
                known = (tensor, made, _version(made))
            self._tensors[key_in(self._tensors, tensor)] = known
        return known[1]

    def _copy(self, tensor: Tensor) -> Tensor:
        is_first = not self._tensors
        if torch.compiler.is_dynamo_compiling():
            return _rounded(tensor, self.target, is_first)
        if torch.is_inference_mode_enabled():
            # a tensor of inference does not count what is written to it
            with torch.inference_mode(False), torch.no_grad():
                made = _rounded(tensor, self.target, is_first)
        else:
            made = _rounded(tensor, self.target, is_first)
        if self.target in HALF_TYPES and (tensor.is_leaf or not tensor.requires_grad):
            # activations would live as long as their copies
            keep_original(made, tensor)
        return made

    def _known(self, tensor: Tensor) -> tuple[Tensor, Tensor, int | None] | None:
        if not torch.compiler.is_dynamo_compiling():
            return self._tensors.get(id(tensor))
        for known in self._tensors.values():
            if known[0] is tensor:
                return known
        return None

    def exact(self, value: Any) -> Any:
        """``value``, any nesting, with the originals of 16-bit copies that :meth:`cast` made for calls around this one."""
        return map_tensors(self._exact, value)

    def _exact(self, tensor: Tensor) -> Tensor:
        """The numbers that this one was rounded from, unless it was written to since. Gradients go through it."""
        original = self._original_tensor(tensor)
        if original is None:
            return tensor
        return _unrounded(tensor, original) if tensor.requires_grad else original

    def _original_tensor(self, tensor: Tensor) -> Tensor | None:
        if not torch.compiler.is_dynamo_compiling():
            return original_of(tensor)
        for copies in reversed(self._within):
            for original, made, before in copies._tensors.values():
                if made is tensor and not _was_written(made, before):
                    return original
        return None

    def clamped(self) -> bool:
        """Whether a tensor had finite numbers beyond the range of the type that are its largest in the copy. Syncs."""
        limit = torch.finfo(self.target).max
        pairs = [(tensor, made) for tensor, made, _ in self._tensors.values() if tensor.layout is torch.strided]
        return any(
            bool((tensor.isfinite() & (tensor.abs() > limit) & made.isfinite()).any())
            for tensor, made in pairs
            if not tensor.is_meta and not tensor.is_nested and tensor.dtype is not self.target
        )

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """What was written to since it was cast: (tensor, its copy)."""
        return [(tensor, made) for tensor, made, before in self._tensors.values() if _was_written(made, before)]

    def write_back(self, result: Any = None) -> Any:
        """Let what was written to copies reach the originals.

        Returns:
            ``result`` with the caller's tensors in place of copies that were written to.
        """
        written = self.written()
        for tensor, made in written:
            if tensor.shape == made.shape:
                value = _unrounded(made, tensor)
            else:
                # an empty tensor that was given as ``out``
                value = made
                tensor.resize_(made.shape)
            if tensor.requires_grad and tensor.is_leaf:
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                tensor.copy_(value)
            if getattr(tensor, _ORIGINAL, (None,))[0] is made:
                keep_original(tensor, made)
        for original, made, (had, attributes) in self._rebuilt.values():
            now, attributes_now = held_by(made)
            if isinstance(now, list):
                if len(now) != len(had) or any(new is not old for new, old in zip(now, had)):
                    original[:] = [self._original(item) for item in now]
            else:
                self._update(original, had, now, _set_item, _delete_item)
            if not getattr(getattr(original, '__dataclass_params__', None), 'frozen', False):
                # what a frozen one has of its own, it caches for itself
                self._update(original, attributes, attributes_now, setattr, delattr)
        return self.originals(result, written) if written else result

    def _update(
        self, original: Any, had: Any, now: dict[Any, Any], put: Callable[..., None], remove: Callable[..., None]
    ) -> None:
        """Let what a copy holds now, and did not before, reach its original."""
        for key in had:
            if key not in now:
                remove(original, key)
        for key, item in now.items():
            if key not in had or item is not had[key]:
                put(original, key, self._original(item))

    def _original(self, value: Any) -> Any:
        """What stands behind a copy; anything else is its own."""
        for original, made, _ in (*self._rebuilt.values(), *self._tensors.values()):
            if made is value:
                return original
        return value

    def originals(self, result: Any, among: Sequence[tuple[Tensor, Tensor]] | None = None) -> Any:
        """``result`` with the caller's tensors in place of their copies."""
        pairs = [(tensor, made) for tensor, made, _ in self._tensors.values()] if among is None else among

        def original(tensor: Tensor) -> Tensor:
            for given, made in pairs:
                if made is tensor:
                    return given
            return tensor

        return map_tensors(original, result)


# those of ``operator`` have no place in a graph
def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _delete_item(container: Any, key: Any) -> None:
    del container[key]


def keep_original(made: Tensor, original: Tensor) -> None:
    """Note what a 16-bit tensor is a copy of."""
    setattr(made, _ORIGINAL, (original, made._version))


def original_of(value: Any) -> Tensor | None:
    """What a 16-bit tensor is a copy of; None where that is not known, or the copy was written to since."""
    original, version = getattr(value, _ORIGINAL, (None, None))
    return original if version is not None and value._version == version else None


def _rounded(tensor: Tensor, dtype: torch.dtype, is_first: bool = False) -> Tensor:
    """In another type; finite numbers of a mask or the like beyond its range become its largest, of a first tensor those below.

    Args:
        tensor: What is cast; where it has a gradient, or is sparse, such numbers become infinite.
        dtype: The type.
        is_first: Whether it is the first tensor of the call.
    """
    limit = torch.finfo(dtype).max
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if tensor.requires_grad or not is_dense or limit >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype)
    if is_first:
        # masks are negative. Of data, which come first, what is too large overflows, so that the step is skipped
        made = tensor.to(dtype)
        return torch.where(made.isneginf() & tensor.isfinite(), -limit, made)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit)).to(dtype)


def _unrounded(made: Tensor, original: Tensor) -> Tensor:
    """A copy that was written to, with the numbers of the original where nothing was."""
    with torch.no_grad():
        is_same = (made == _rounded(original, made.dtype)) | (made == original.to(made.dtype))
        value = torch.where(is_same, original, made)
        lost = (value - made).nan_to_num(0.0, 0.0, 0.0)
    # the gradient goes through the copy
    return made + lost if made.requires_grad else value


_mark_last_tensor = constant_when_traced(graph_internals.mark_last_tensor)
_is_marked_written = constant_when_traced(graph_internals.was_written)


def _version(tensor: Tensor) -> int | None:
    if torch.compiler.is_dynamo_compiling():
        return _mark_last_tensor()
    # inference tensors keep no count
    return None if tensor.is_inference() else tensor._version


def _was_written(made: Tensor, before: int | None) -> bool:
    if before is None:
        return False
    return _is_marked_written(before) if torch.compiler.is_dynamo_compiling() else made._version != before
