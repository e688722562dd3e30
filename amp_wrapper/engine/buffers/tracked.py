"""Tracks the buffers of some modules and their copies, and tells writes of forward calls from those of other code."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .copies import LARGE, BufferGroup, LargeBuffer, form_of, is_tracked, same_bits, write_back

_version: Callable[[Tensor], int] = operator.attrgetter('_version')


class TrackedBuffers:
    """The buffers of some modules, numbered from 0 (their *place* in what follows).

    What was noted last of a buffer is the tensor itself, where its memory lies, and its version counter. What differs from that
    has been written since. What cannot be given back is left alone until the next step: a buffer that got another shape, type
    or device.

    Args:
        modules: (qualified name, module).
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.names: list[str] = []
        #: As last noted.
        self.tensors: list[Tensor | None] = []
        # places by id of the module
        self._of_module: dict[int, list[int]] = {}
        #: Of all modules, with buffers or without.
        self.module_ids = frozenset(id(module) for _, module in modules)
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._count = len(modules)
        found: list[Tensor] = []
        numbers: list[int] = []
        seen: set[int] = set()
        for number, (name, module) in enumerate(modules):
            for key, buffer in module._buffers.items():
                # shared ones once
                if buffer is None or id(buffer) in seen or not is_tracked(buffer):
                    continue
                seen.add(id(buffer))
                self._of_module.setdefault(id(module), []).append(len(found))
                self.names.append(f'{name}.{key}' if name else key)
                self._slots.append((module._buffers, key))
                found.append(buffer)
                numbers.append(number)
        self._forms = [form_of(tensor) for tensor in found]
        self._left_alone: set[int] = set()
        self.tensors, self._memory, self._versions = self._look()
        # where the copy of each is: a part, and an index into it
        self._copies: dict[int, tuple[BufferGroup | LargeBuffer, int]] = {}
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, tensor in enumerate(found):
            if tensor.numel() * tensor.element_size() > LARGE:
                self._copies[place] = LargeBuffer(tensor, numbers[place]), 0
            else:
                kinds[tensor.device, tensor.dtype].append(place)
        for places in kinds.values():
            group = BufferGroup([found[place] for place in places], [numbers[place] for place in places])
            self._copies.update({place: (group, index) for index, place in enumerate(places)})
        #: All copies, group by group.
        self.parts = list({id(part): part for part, _ in self._copies.values()}.values())
        self._large = [part for part in self.parts if isinstance(part, LargeBuffer)]
        # where NaN is counted
        self._devices = {part.device for part in self.parts if part.has_nan}

    def places_in(self, modules: Iterable[nn.Module]) -> list[int]:
        """The places of the buffers of modules."""
        return [place for module in modules for place in self._of_module.get(id(module), ())]

    # -- who has written -----------------------------------------------------------------------------------------------

    def _look(self) -> tuple[list[Tensor | None], list[tuple[int, int]], list[int]]:
        """The buffers of now: which tensors, where their memory lies, and their versions."""
        now = [buffers.get(key) for buffers, key in self._slots]
        try:
            return now, list(zip(map(id, now), map(Tensor.data_ptr, now))), list(map(_version, now))  # type: ignore[arg-type]
        except (AttributeError, RuntimeError, TypeError):
            # one became None, or of another kind
            kept = [tensor if is_tracked(tensor) else None for tensor in now]
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in kept]
            return (
                now,
                list(zip(map(id, now), pointers)),
                [-1 if tensor is None else tensor._version for tensor in kept],
            )

    def _written(self, notes: bool = True) -> list[tuple[int, Tensor | None, bool]]:
        """The places that were written since they were last noted, the tensors of now, and whether they are others."""
        now, memory, versions = self._look()
        if memory == self._memory and versions == self._versions:
            return []
        known = zip(now, memory, versions, self._memory, self._versions)
        found = [
            (place, tensor, where != before)
            for place, (tensor, where, version, before, last) in enumerate(known)
            if (where, version) != (before, last)
        ]
        if notes:
            self.tensors, self._memory, self._versions = now, memory, versions
        return found

    def note(self) -> None:
        """Whatever was written was written by a forward call."""
        for place, tensor, moved in self._written():
            if moved and place not in self._left_alone:
                self._bind(place, tensor)

    def accept(self, keeps_nan: bool = False) -> None:
        """What somebody else has written since the last forward call is theirs: a skipped step gives that back.

        Args:
            keeps_nan: Whether new NaN stays, too. Nothing is noted then: a call without gradients may go on where somebody
                has written.
        """
        for place, tensor, _ in self._written(notes=not keeps_nan):
            self._bind(place, tensor)
            part, index = self._copies[place]
            if place not in self._left_alone and not part.accept(index, keeps_nan):
                self._bind(place, None)

    def _bind(self, place: int, tensor: Tensor | None) -> None:
        """Give back this tensor from now on, or leave the place alone if it cannot be."""
        if tensor is None or not is_tracked(tensor) or form_of(tensor) != self._forms[place]:
            self._left_alone.add(place)
            tensor = None
        else:
            self._left_alone.discard(place)
        part, index = self._copies[place]
        part.bind(index, tensor)

    # -- one step ------------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Copy all buffers: a step begins. False where one of them is of another form now; nothing is copied then."""
        self.note()
        if self._left_alone:
            return False
        for part in self.parts:
            part.take()
        return True

    def go_on(self) -> None:
        """Another forward call of the step begins."""
        for part in self.parts:
            part.go_on()

    def write_back(self, flag: Tensor | None) -> None:
        """Modules in whose buffers the last forward call has left NaN get theirs back, and all where ``flag`` is up."""
        marks = {device: torch.zeros(self._count, dtype=torch.int64, device=device) for device in self._devices}
        write_back(self.parts, flag, marks)

    def close(self) -> None:
        """The step is over."""
        for place in self._left_alone:
            # looked at again as the next one begins
            self._memory[place] = (0, -1)
        self._left_alone.clear()
        for large in self._large:
            large.close()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The copies of buffers that forward calls have changed, by qualified name. Syncs."""
        others = self._left_alone.union(place for place, _, _ in self._written(notes=False))
        found = {
            place: part.copies[index] for place, (part, index) in sorted(self._copies.items()) if place not in others
        }
        return {
            self.names[place]: copy.detach().clone()
            for place, copy in found.items()
            if copy is not None and not same_bits(copy, self.tensors[place])
        }

    def load(self, copies: Mapping[str, Tensor]) -> None:
        """Take over copies; those of unknown buffers, or of another shape, are left out.

        Args:
            copies: From :meth:`state`.
        """
        for place, (part, index) in self._copies.items():
            value, copy = copies.get(self.names[place]), part.copies[index]
            if value is not None and copy is not None and value.shape == copy.shape:
                copy.copy_(value)
                part.bind(index, self.tensors[place])
