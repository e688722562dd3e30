"""Arguments of a call in another type, and the way back of what is written to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import compiler_internals
from ..compiler_internals import constant_when_traced, never_compiled_alone
from ..policy.nested import CASTABLE, HALF_TYPES, Memo, Types, map_tensors, parts_of, set_part

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

    def __init__(self, target: torch.dtype, sources: Types = CASTABLE, within: Sequence[Copies] = ()) -> None:
        self.target, self._sources, self._within = target, sources, within
        # tensors with their versions, containers with what they held
        self._tensors, self._containers = Memo(), Memo()

    def cast(self, value: Any) -> Any:
        """``value``, any nesting, with copies of the tensors that have to be cast; itself where there are none."""
        return map_tensors(self._cast, value, rebuilt=self._containers)

    def _cast(self, tensor: Tensor) -> Tensor:
        # the comparison is cheaper than the set lookup, and most tensors have the type already
        if tensor.dtype is self.target or tensor.dtype not in self._sources:
            return tensor
        made: Tensor | None = self._tensors.find(tensor)
        if made is None:
            exact = self._exact(tensor)
            made = exact if exact.dtype is self.target else self._copy(exact)
            self._tensors.add(tensor, made, _version(made, is_new=made is not exact))
        return made

    def _copy(self, tensor: Tensor) -> Tensor:
        is_traced = torch.compiler.is_dynamo_compiling()
        # a tensor of inference does not count what is written to it
        counts = is_traced or not torch.is_inference_mode_enabled()
        with nullcontext() if counts else torch.inference_mode(False):
            made = _rounded(tensor, self.target)
        if not is_traced and self.target in HALF_TYPES and (tensor.is_leaf or not tensor.requires_grad):
            # activations would live as long as their copies
            keep_original(made, tensor)
        return made

    def exact(self, value: Any) -> Any:
        """``value``, any nesting, with the originals of 16-bit copies that :meth:`cast` made for calls around this one."""
        return map_tensors(self._exact, value)

    def _exact(self, tensor: Tensor) -> Tensor:
        """The numbers that this one was rounded from, unless it was written to since. Gradients go through it."""
        original = self._known_original(tensor)
        if original is None:
            return tensor
        return _unrounded(tensor, original) if tensor.requires_grad else original

    def _known_original(self, tensor: Tensor) -> Tensor | None:
        if not torch.compiler.is_dynamo_compiling():
            return original_of(tensor)
        entries = [entry for copies in self._within for entry in copies._tensors.entries]
        known = [given for given, made, before in entries if made is tensor and not _was_written(made, before)]
        return known[-1] if known else None

    def write_back(self, result: Any = None) -> Any:
        """Let what was written to copies reach the originals.

        Returns:
            ``result``; where something was written, with the caller's tensors in place of their copies.
        """
        entries = self._tensors.entries
        written: list[tuple[Tensor, Tensor]] = [(t, made) for t, made, before in entries if _was_written(made, before)]
        for tensor, made in written:
            value, is_leaf = _unrounded(made, tensor), tensor.requires_grad and tensor.is_leaf
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_leaf):
                tensor.copy_(value)
            if getattr(tensor, _ORIGINAL, (None,))[0] is made:
                keep_original(tensor, made)
        for original, made, had in self._containers.entries:
            now = dict(parts_of(made) or ())
            changed = [key for key, item in now.items() if key not in had or item is not had[key]]
            gone = [key for key in had if key not in now]
            if isinstance(original, list):
                if changed or gone:
                    original[:] = [self.original(item) for item in made]
                continue
            for key in gone if isinstance(original, dict) else ():
                del original[key]
            for key in changed:
                set_part(original, key, self.original(now[key]))
        return map_tensors(self.original, result) if written else result

    def original(self, value: Any) -> Any:
        """What stands behind a copy; anything else is its own."""
        for original, made, _ in (*self._containers.entries, *self._tensors.entries):
            if made is value:
                return original
        return value


def keep_original(made: Tensor, original: Tensor) -> None:
    """Note what a 16-bit tensor is a copy of."""
    setattr(made, _ORIGINAL, (original, made._version))


def original_of(value: Any) -> Tensor | None:
    """What a 16-bit tensor is a copy of; None where that is not known, or the copy was written to since."""
    original, version = getattr(value, _ORIGINAL, (None, None))
    return original if version is not None and value._version == version else None


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In another type. Finite numbers below its range, as masks have, become its lowest, unless it has a gradient or is sparse.

    Those above its range become infinite: what is too large overflows, so that the step is skipped.
    """
    made, limit = tensor.to(dtype), torch.finfo(dtype).max
    is_sparse = tensor.layout is not torch.strided or tensor.is_nested
    if tensor.requires_grad or is_sparse or limit >= torch.finfo(tensor.dtype).max:
        return made
    return torch.where(tensor.isinf(), made, made.nan_to_num(torch.nan, torch.inf, -limit))


def _unrounded(made: Tensor, original: Tensor) -> Tensor:
    """A copy that was written to, with the numbers of the original where nothing was."""
    with torch.no_grad():
        is_same = (made == _rounded(original, made.dtype)) | (made == original.to(made.dtype))
        value = torch.where(is_same, original, made)
        lost = (value - made).nan_to_num(0.0, 0.0, 0.0)
    # the gradient goes through the copy
    return made + lost if made.requires_grad else value


_last_traced_tensor = constant_when_traced(compiler_internals.last_traced_tensor)
_traced_was_written = constant_when_traced(compiler_internals.was_written)


def _version(made: Tensor, is_new: bool) -> int | None:
    """What tells, with :func:`_was_written`, whether a tensor is written to from now on; None where nothing does."""
    if torch.compiler.is_dynamo_compiling():
        return _last_traced_tensor() if is_new else None
    # inference tensors keep no count
    return None if made.is_inference() else made._version


def _was_written(made: Tensor, before: int | None) -> bool:
    if before is None:
        return False
    return _traced_was_written(before) if torch.compiler.is_dynamo_compiling() else made._version != before


# between two graphs they run as they are
never_compiled_alone(globals())
