"""What the buffers of a model were before the forward passes of a step, so that a skipped step gives them back.

One batch with NaN leaves NaN in BatchNorm's running statistics for good, although the optimizer step is skipped. So buffers
are copied when the first forward pass since the last step begins, and the step writes the copies back by the flag that skips
it: on the device, without a host read.

What counts as a forward pass is a call of the model, or of a part of it, with gradients enabled, checkpointed segments that
run again included. Whatever is written between two of them was written by somebody else, and stays. torch's version counters
tell: they are noted when a pass ends and compared when the next one begins, and at the step.

Losses of other optimizers may go through the same modules. Their steps decide where the optimizer itself has no gradients
(:mod:`amp_wrapper.engine.buffers.users`).

Whatever a pass was for, NaN that it has left is looked for when the next one begins, at each step, and before somebody reads
the buffers: those of the module then become what they were before the pass. So a second set of copies follows the passes of a
step. A pass without gradients is covered in this alone: no step comes of it.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ... import torch_internals
from .averages import AveragedBuffers
from .copies import BufferGroup, form_of, is_tracked, new_nan, same_bits, selected
from .hooks import EnterBuffers, EnterModelBuffers, LeaveBuffers, LeaveModelBuffers, SaveBuffers, is_broadcast
from .users import Deciders, User

#: Larger buffers are copied only where their version tells of a change, and their copy is dropped where it never does.
LARGE = 2**20


_Slot = tuple[dict[str, Tensor | None], str]
_version: Callable[[Tensor], int] = operator.attrgetter('_version')


class _Region:
    """One call that is under way on a thread."""

    __slots__ = ('counts', 'covers', 'depth', 'module', 'places')

    def __init__(
        self, module: nn.Module, covers: Container[int] | None, places: Sequence[int] | None, counts: bool
    ) -> None:
        self.module = module
        # whether it is a pass
        self.counts = counts
        # ids of the modules below, and the places of their buffers; None for all
        self.covers = covers
        self.places = places
        self.depth = 0


class _Regions(threading.local):
    def __init__(self) -> None:
        self.open: list[_Region] = []


def _versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return list(map(_version, tensors))  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):
        # a buffer became None, or a tensor of inference mode
        return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(map(operator.is_, some, others))


class BufferSnapshots:
    """The buffers that one optimizer's skipped steps give back.

    Args:
        roots: (qualified name, module): the models.
        owners: Gives the parameters that the optimizer steps, and those that others step, beside those of other snapshots. A
            buffer belongs to the optimizers that step a parameter of its module; without any, of the modules below it, or else
            of the one above.
        leave: Module classes to leave alone, with everything in them.
        owner: Whose steps these are; not kept alive.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, nn.Module]],
        owners: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor]]],
        leave: tuple[type, ...] = (),
        owner: User | None = None,
    ) -> None:
        self._owner = (lambda: None) if owner is None else ref(owner)
        self._deciders = Deciders(owner)
        self._roots = list(roots)
        self._owners = owners
        self._leave = leave
        self._handles: dict[int, tuple[RemovableHandle, ...]] = {}
        self._regions = _Regions()
        self._lock = threading.Lock()
        # calls under way, on all threads
        self._active = 0
        self._stale = True
        # whether the copies are those of the present step; or of a pass without a graph, from which no step comes
        self._live = False
        self._has_step = False
        # whether NaN has been looked for since the last pass
        self._looked = True
        self._trusts = False
        # places that somebody gave another shape or type since the step began
        self._lost: set[int] = set()
        self._large: dict[int, Tensor | None] = {}
        self._averaged = AveragedBuffers()
        self._slots: list[_Slot] = []
        self._seen: list[Tensor | None] = []
        self._collect()
        _share_anew()
        _living.add(self)
        _listen()

    # -- which buffers -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Look for the buffers, and put hooks on the modules that have some."""
        self._stale = False
        mine, theirs = ({id(weight) for weight in weights} for weights in self._owners())
        for other in _living:
            if other is not self:
                theirs.update(map(id, other._owners()[0]))
        copies = {id(self._seen[place]): copy for place, copy in self._large.items()}
        self._slots, self._names = [], []
        # what cannot be copied now, and may be replaced by something that can
        self._others: list[_Slot] = []
        self._modules: list[nn.Module] = []
        places: dict[int, list[int]] = {}
        numbers: list[int] = []
        seen: set[int] = set()
        for name, module in self._owned(mine, theirs):
            self._modules.append(module)
            for key, buffer in module._buffers.items():
                if buffer is None or not is_tracked(buffer):
                    self._others.append((module._buffers, key))
                elif id(buffer) not in seen:
                    # shared ones once
                    seen.add(id(buffer))
                    places.setdefault(id(module), []).append(len(self._slots))
                    self._slots.append((module._buffers, key))
                    numbers.append(len(self._modules) - 1)
                    self._names.append(f'{name}.{key}' if name else key)
        self._module_ids = set(map(id, self._modules))
        self._lengths = [len(module._buffers) for module in self._modules]
        self._not_copied = _now(self._others)
        found = [tensor for tensor in _now(self._slots) if tensor is not None]
        self._forms = [form_of(tensor) for tensor in found]
        # as they were when a forward pass last ended or began
        self._seen = list(found)
        self._versions = _versions_of(found)
        # versions of what was copied
        self._copied = [-1] * len(found)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        self._large = {}
        for place, tensor in enumerate(found):
            if tensor.numel() * tensor.element_size() > LARGE:
                self._large[place] = copies.get(id(tensor))
            else:
                kinds[tensor.device, tensor.dtype].append(place)
        self._numbers = numbers
        self._groups = [
            BufferGroup(chosen, [found[place] for place in chosen], [numbers[place] for place in chosen])
            for chosen in kinds.values()
        ]
        self._know(found)
        self._put_hooks(places)

    def _owned(self, mine: set[int], theirs: set[int]) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose buffers belong to the optimizer, in order."""
        seen: set[int] = set()
        either = mine | theirs

        def visit(module: nn.Module, name: str, above: bool) -> Iterator[tuple[str, nn.Module]]:
            if id(module) in seen or isinstance(module, self._leave):
                return
            seen.add(id(module))
            stepped = mine
            if theirs:
                stepped = either.intersection(map(id, module.parameters(recurse=False)))
                stepped = stepped or either.intersection(map(id, module.parameters()))
            ours = bool(stepped & mine) if stepped else above
            if ours:
                yield name, module
            for key, child in module.named_children():
                yield from visit(child, f'{name}.{key}' if name else key, ours)

        for name, root in self._roots:
            yield from visit(root, name, True)

    def _put_hooks(self, places: Mapping[int, list[int]]) -> None:
        roots = {id(root): root for _, root in self._roots}
        # scripts call the model, one of its parts, or some layer
        parts = [child for root in roots.values() for child in root.children()]
        owners = [module for module in self._modules if id(module) in places]
        wanted: dict[int, nn.Module] = dict(roots)
        self._below: dict[int, tuple[frozenset[int], list[int]]] = {}
        # models without a buffer of ours
        self._empty = {
            id(root) for root in roots.values() if not any(id(module) in places for module in root.modules())
        }
        for module in (*parts, *owners):
            below = frozenset(map(id, module.modules()))
            inside = [place for key in below for place in places.get(key, ())]
            if inside and id(module) not in roots:
                wanted[id(module)] = module
                self._below[id(module)] = (below, inside)
        for key in [key for key in self._handles if key not in wanted]:
            for handle in self._handles.pop(key):
                handle.remove()
        for key, module in wanted.items():
            if key not in self._handles:
                whole = key in roots
                enter = EnterModelBuffers(self) if whole else EnterBuffers(self)
                leave = LeaveModelBuffers(self) if whole else LeaveBuffers(self)
                self._handles[key] = (
                    module.register_forward_pre_hook(enter, prepend=True),
                    module.register_forward_hook(leave, always_call=True),
                    *([module.register_state_dict_pre_hook(SaveBuffers(self))] if whole else []),  # type: ignore[no-untyped-call]
                )

    def remove(self) -> None:
        """Take the hooks off."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        _living.discard(self)
        _share_anew()

    def look_again(self, parent: nn.Module) -> None:
        """A module is put into ``parent``."""
        self._stale = self._stale or id(parent) in self._module_ids

    # -- forward passes ----------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, has_step: bool = True) -> None:
        """A forward pass begins that may write to buffers.

        Args:
            module: What is called: a model, a part of one, or a replica.
            has_step: Whether a step may come of it; not without gradients.
        """
        regions = self._regions.open
        if regions and (regions[-1].covers is None or id(module) in regions[-1].covers):
            self._has_step = self._has_step or has_step
            if regions[-1].module is module:
                # it calls itself
                regions[-1].depth += 1
            return
        if torch_internals.in_function_transform():
            # nothing of this belongs into a graph, and buffers may be stand-ins
            return
        covers, places = self._below.get(id(module), (None, None))
        if self._live and self._has_step and not has_step:
            # what is written without a graph between the passes of a step is its author's, update_bn's for one
            self.settle()
            regions.append(_Region(module, covers, places, False))
            return
        with self._lock:
            self._active += 1
            if self._active == 1:
                with torch.inference_mode(False), torch.no_grad():
                    self._begin(places, has_step)
        regions.append(_Region(module, covers, places, True))
        if id(module) in self._handles:
            # what hooks that came later write belongs to the pass
            key = self._handles[id(module)][1].id
            if next(reversed(module._forward_hooks)) != key:
                module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]

    def leave(self, module: nn.Module, output: Any = None) -> None:
        """The counterpart of :meth:`enter`.

        Args:
            module: What was called.
            output: What it returned; None after an exception.
        """
        regions = self._regions.open
        if not regions or regions[-1].module is not module:
            return
        if regions[-1].depth:
            regions[-1].depth -= 1
            return
        region = regions.pop()
        self._looked = False
        if not region.counts:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                self._take_written(region.places)
            return
        with self._lock:
            self._active = max(self._active - 1, 0)
            self._note(region.places)
        # a single optimizer decides alone
        if len(_living) > 1 and self._live and id(module) not in self._empty:
            self._deciders.watch(output)

    def _note(self, places: Sequence[int] | None = None) -> None:
        """Whatever was written was written by forward passes."""
        if places is None:
            self._seen = _now(self._slots)
            self._versions = _versions_of(self._seen)
            return
        now = _now([self._slots[place] for place in places])
        for place, tensor, version in zip(places, now, _versions_of(now)):
            self._seen[place], self._versions[place] = tensor, version

    def _begin(self, places: Sequence[int] | None, has_step: bool) -> None:
        if self._trusts:
            # the copies came from a checkpoint, and the buffers too
            self._trusts = False
            self._note()
        if self._live:
            doubt = self._deciders.take_doubt()
            self._give_back(doubt)
            if doubt is not None or not self._has_step or self._deciders.are_done:
                self._close()
        if not self._live:
            self._take()
            self._has_step = has_step
        else:
            # what DDP broadcasts goes on being the work of forward passes
            if self._take_written(places):
                # it may have left NaN, too
                self._write_back(None)
            for group in self._groups:
                group.go_on()

    def _take(self) -> None:
        """Copy all buffers: a step begins."""
        if (
            self._stale
            or self._lengths != [len(module._buffers) for module in self._modules]
            or not _are_same(_now(self._others), self._not_copied)
            or not self._find_again()
        ):
            self._collect()
        self._seen = list(self._known)
        self._versions = _versions_of(self._seen)
        for group in self._groups:
            group.take()
        for place, copy in self._large.items():
            if self._copied[place] == self._versions[place]:
                # as it was, or never written by a forward pass
                continue
            if copy is None:
                self._large[place] = self._known[place].detach().clone()
            else:
                copy.copy_(self._known[place])
        self._copied = list(self._versions)
        self._live = True

    def _find_again(self) -> bool:
        """Whether there are the same buffers as before, or others in their places that look like them."""
        now = _now(self._slots)
        if not _are_same(now, self._known):
            found = [tensor for tensor in now if tensor is not None and is_tracked(tensor)]
            if len(found) < len(now) or [form_of(tensor) for tensor in found] != self._forms:
                return False
            self._know(found)
        return [tensor.data_ptr() for tensor in self._known] == self._places_in_memory

    def _know(self, tensors: list[Tensor]) -> None:
        self._known = tensors
        self._places_in_memory = [tensor.data_ptr() for tensor in tensors]
        for group in self._groups:
            group.tensors = [tensors[place].data for place in group.places]

    def _take_written(self, places: Sequence[int] | None) -> bool:
        """Copy what somebody has written since the last forward pass: it is theirs, and stays. Whether there was anything."""
        chosen: Sequence[int] = range(len(self._slots)) if places is None else places
        now = _now(self._slots if places is None else [self._slots[place] for place in places])
        versions = _versions_of(now)
        if places is None and _are_same(now, self._seen) and versions == self._versions:
            return False
        if is_broadcast():
            self._note(places)
            return False
        copies: dict[int, Tensor] | None = None
        for place, tensor, version in zip(chosen, now, versions):
            if tensor is self._seen[place] and version == self._versions[place]:
                continue
            self._seen[place], self._versions[place] = tensor, version
            copies = self._copies() if copies is None else copies
            if tensor is not None and self._fits(place, tensor) and place in copies:
                # a copy without NaN is kept: what somebody means to write has none
                copies[place].copy_(selected(copies[place], tensor, new_nan(tensor, copies[place])))
                self._copied[place] = version
            else:
                self._lost.add(place)
        return copies is not None

    def _copies(self) -> dict[int, Tensor]:
        """The copies that there are, by place."""
        found = {place: copy for place, copy in self._large.items() if copy is not None}
        for group in self._groups:
            found.update(zip(group.places, group.copies))
        return found

    def _fits(self, place: int, tensor: Tensor) -> bool:
        """Whether the copy at a place can be written to a tensor."""
        return is_tracked(tensor) and form_of(tensor) == self._forms[place]

    # -- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, flag: Tensor | None) -> None:
        """The step is taken or skipped: where ``flag`` is up, buffers become what they were. No host read.

        Buffers that somebody has written since the last forward pass stay as they are, and so do those that have another
        shape, type or device now.

        Args:
            flag: float32 scalar on any device, not zero where the step is skipped; None for a step that is taken.
        """
        if self._active or self._trusts or self._regions.open:
            # an interrupt ended a pass without its hooks, or the step is taken inside of one
            self._active, self._trusts = 0, False
            self._regions.open.clear()
            self._note()
        if self._live:
            self._give_back(flag if self._has_step else None)
        self._close()

    @torch.no_grad()
    def decide(self, user: User, flag: Tensor | None) -> None:
        """The step of another optimizer is taken or skipped: where it decides, buffers become what they were.

        Args:
            user: Whose step it is.
            flag: As for :meth:`restore`.
        """
        if not self._live or self._active:
            return
        if not self._has_step:
            self._give_back(None)
            self._close()
        elif self._deciders.other_step(user, flag):
            self._give_back(flag)
            if not self._deciders.wait:
                self._close()
        elif not self._looked:
            self._give_back(None)

    def _give_back(self, flag: Tensor | None) -> None:
        self._looked = True
        self._write_back(flag)
        if flag is not None:
            self._averaged.give_back(flag)

    @torch.no_grad()
    def settle(self) -> None:
        """Somebody is about to read the buffers: an evaluation, an average, who saves. No host read.

        Where no loss has gone through the passes so far, the skipped step of another optimizer decides on them now.
        """
        if not self._live or self._active or torch_internals.in_function_transform():
            return
        if self._deciders.doubts:
            self._give_back(self._deciders.take_doubt())
            if not self._deciders.wait:
                self._close()
        elif not self._looked:
            self._give_back(None)

    def _close(self) -> None:
        """The step is over: the next forward pass copies anew."""
        live, self._live = self._live, False
        self._deciders.forget()
        self._averaged.release()
        self._lost.clear()
        for place, copy in self._large.items():
            if live and copy is not None and self._copied[place] == self._versions[place]:
                # constant so far: not kept twice
                self._large[place] = None

    def _write_back(self, flag: Tensor | None) -> None:
        """Modules in whose buffers the last pass has left NaN get theirs back, and all where ``flag`` is up."""
        now = _now(self._slots)
        versions = _versions_of(now)
        chosen: set[int] | None = None
        if (
            self._lost
            or not _are_same(now, self._known)
            or not _are_same(now, self._seen)
            or versions != self._versions
            or [tensor.data_ptr() for tensor in self._known] != self._places_in_memory
        ):
            chosen = {
                place
                for place, (tensor, seen, version) in enumerate(zip(now, self._seen, versions))
                if tensor is seen and version == self._versions[place] and place not in self._lost
                # one that was replaced in a forward pass has to look as before
                if tensor is not None and self._fits(place, tensor)
            }
            for group in self._groups:
                for index, place in enumerate(group.places):
                    tensor = now[place]
                    if tensor is not None and place in chosen:
                        group.tensors[index] = tensor.data
        # by device, NaN in each module
        count = len(self._modules)
        marks = {group.device: torch.zeros(count, dtype=torch.int64, device=group.device) for group in self._groups}
        found: set[torch.device] = set()
        parts: list[tuple[BufferGroup, list[int] | None]] = []
        for group in self._groups:
            indices = None
            if chosen is not None:
                indices = [index for index, place in enumerate(group.places) if place in chosen]
            if indices is None or indices:
                group.read(indices)
                if group.mark(marks[group.device]):
                    found.add(group.device)
                parts.append((group, indices))
        writes: list[Callable[[], object]] = []
        written = []
        for place, copy in self._large.items():
            tensor = now[place]
            if copy is None or tensor is None or versions[place] == self._copied[place]:
                continue
            if chosen is None or place in chosen:
                back = new_nan(tensor, copy)
                if tensor.device in marks:
                    marks[tensor.device][self._numbers[place]] += back
                    found.add(tensor.device)
                if flag is not None:
                    back = back | (flag.to(back.device) > 0)
                writes.append(functools.partial(tensor.data.copy_, selected(copy, tensor, back)))
                written.append(place)
        writes += [
            group.select(flag, marks[group.device] if group.device in found else None, indices)
            for group, indices in parts
        ]
        # all is read before anything is written: buffers may be views of one another
        for write in writes:
            write()
        if chosen is not None:
            # of those that replaced others, nothing is kept
            self._know(self._known)
        self._note(written)

    def used_by(self, users: Iterable[User]) -> None:
        """Losses of these have made use of forward passes since the step began."""
        if self._live:
            self._deciders.used_by(users)

    def average(self, average: nn.Module, model: nn.Module) -> None:
        """An average of the buffers is about to be updated. In the middle of a step, it shares the fate of what it averages.

        Args:
            average: A copy of ``model``.
            model: The model, or a wrapper of the same structure that the copy was made from.
        """
        if not self._live and not self._averaged.waits:
            return
        mine = set(map(id, self._seen))
        if not mine.isdisjoint(map(id, model.buffers())):
            self.settle()
        means = {
            name: mean for (name, mean), buffer in zip(average.named_buffers(), model.buffers()) if id(buffer) in mine
        }
        self._averaged.hold(average, means, self._live)

    def averaged(self, average: nn.Module) -> None:
        """The counterpart of :meth:`average`."""
        self._averaged.note(average)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The copies of an open window by qualified name, for a checkpoint; empty where none is open. Syncs."""
        if not self._live or not self._has_step:
            return {}
        if self._trusts:
            # saved again before any forward pass: the buffers were loaded meanwhile
            self._note()
        now = _now(self._slots)
        versions = _versions_of(now)
        return {
            self._names[place]: copy.detach().clone()
            for place, copy in sorted(self._copies().items())
            # not those that somebody has written since, and where no pass has written, the copy is the buffer
            if now[place] is self._seen[place]
            and versions[place] == self._versions[place]
            and place not in self._lost
            and not same_bits(copy, now[place])
        }

    def averages(self) -> list[dict[str, dict[str, Tensor]]]:
        """Of averages that were updated in an open window, the buffers ``before`` it and ``now``, for a checkpoint. Syncs."""
        return self._averaged.state() if self._live and self._has_step else []

    @torch.no_grad()
    def load(self, copies: Mapping[str, Tensor], averages: Sequence[Mapping[str, Mapping[str, Tensor]]] = ()) -> None:
        """Continue an open window. The buffers have been loaded, or will be before the next forward pass.

        Args:
            copies: From :meth:`state`; those of unknown buffers, or of another shape, are left out.
            averages: From :meth:`averages`.
        """
        self._take()
        there = self._copies()
        for place, name in enumerate(self._names):
            value = copies.get(name)
            if value is not None and place in there and value.shape == there[place].shape:
                there[place].copy_(value)
                self._copied[place] = -1
        self._averaged.load(averages)
        owner = self._owner()
        self._deciders.used_by([] if owner is None else [owner])
        self._has_step = self._trusts = True


def _now(slots: Iterable[_Slot]) -> list[Tensor | None]:
    return [buffers.get(name) for buffers, name in slots]


@contextmanager
def averaging(average: nn.Module, model: nn.Module) -> Iterator[None]:
    """Around the update of an average of a model.

    Args:
        average: A copy of the model.
        model: The model, or a wrapper of the same structure that the copy was made from.
    """
    found = list(_living)
    for snapshots in found:
        snapshots.average(average, model)
    yield
    for snapshots in found:
        snapshots.averaged(average)


def decided(user: User, flag: Tensor | None) -> None:
    """An optimizer takes a step or skips it: what its losses did to the buffers of other optimizers' modules is settled.

    Args:
        user: Whose step it is.
        flag: As for :meth:`BufferSnapshots.restore`.
    """
    for snapshots in list(_living):
        snapshots.decide(user, flag)


def are_several() -> bool:
    """Whether several optimizers have buffers that their skipped steps give back."""
    return len(_living) > 1


def settle() -> None:
    """Somebody is about to save models: :meth:`BufferSnapshots.settle` for all."""
    for snapshots in list(_living):
        snapshots.settle()


# those whose modules may be given further ones
_living: WeakSet[BufferSnapshots] = WeakSet()
_listening: RemovableHandle | None = None


def _share_anew() -> None:
    """An optimizer came or went: whose buffers are whose is found out again as the next steps begin."""
    for snapshots in _living:
        snapshots._stale = True


def _listen() -> None:
    global _listening
    if _listening is None:
        _listening = nn.modules.module.register_module_module_registration_hook(_on_new_module)


def _on_new_module(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    for snapshots in list(_living):
        snapshots.look_again(parent)


__all__ = ['LARGE', 'BufferSnapshots', 'are_several', 'averaging', 'decided', 'settle']
