"""Buffers of averages that are updated while gradients accumulate: a skipped step gives them back, too.

An average that is updated after each iteration, as mmengine's EMAHook does it, takes up what a batch with NaN has left in the
model's buffers before the step comes that is skipped. The model's buffers return then; a mean that was NaN once stays NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .copies import form_of, is_tracked, same_bits, selected

#: Windows after which averages of a checkpoint that were not updated any more are forgotten.
LATEST = 1000


@dataclasses.dataclass
class _Held:
    """A buffer of an average: its name, itself, its copy, and its version after the last update."""

    name: str
    mean: Tensor
    copy: Tensor
    version: int = -1

    def is_ours(self) -> bool:
        """Whether nobody else has written to it since the last update."""
        return self.version in (-1, self.mean._version)


class AveragedBuffers:
    """Copies of the buffers of averages, from before their first update in a window of accumulated batches."""

    def __init__(self) -> None:
        # of each average, by id of the buffer
        self._held: WeakKeyDictionary[nn.Module, dict[int, _Held]] = WeakKeyDictionary()
        # of a checkpoint, until the averages are seen: in a file, they have no name
        self._loaded: list[Mapping[str, Mapping[str, Tensor]]] = []
        self._seen: WeakSet[nn.Module] = WeakSet()
        # how many windows have ended since, and how the one that was loaded did
        self._ended = 0
        self._flag: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether averages of a checkpoint have not been seen yet."""
        return bool(self._loaded)

    @torch.no_grad()
    def hold(self, average: nn.Module, means: Mapping[str, Tensor], opens: bool) -> None:
        """Copy buffers that are about to be averaged, unless an earlier update of the window has copied them.

        Syncs at the first update of each average after a checkpoint was loaded inside of a window.

        Args:
            average: A copy of the model.
            means: Its buffers by name; of any type, on any device.
            opens: Whether there is a window.
        """
        before: dict[str, Tensor] = {}
        if self._loaded and average not in self._seen:
            self._seen.add(average)
            before = self._find(means)
        if self._ended and before:
            # the step came between the checkpoint and this update
            for name, copy in before.items():
                _give_back(means[name], copy, self._flag)
            before = {}
        if not opens:
            return
        held = self._held.setdefault(average, {})
        for name, mean in means.items():
            known = held.get(id(mean))
            if known is not None and known.is_ours():
                continue
            if is_tracked(mean):
                # what somebody has written since the last update is his
                held[id(mean)] = _Held(name, mean, before[name] if name in before else mean.detach().clone())

    def note(self, average: nn.Module) -> None:
        """The update has ended."""
        for entry in self._held.get(average, {}).values():
            entry.version = -1 if entry.mean.is_inference() else entry.mean._version

    def _find(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loaded copies of an average: those of the one that looked like it when the checkpoint was saved."""
        for index, entry in enumerate(self._loaded):
            now = {name: value.to(means[name].device) for name, value in entry['now'].items() if name in means}
            if len(now) == len(entry['now']) and all(same_bits(value, means[name]) for name, value in now.items()):
                del self._loaded[index]
                return {
                    name: value.to(means[name].device, copy=True)
                    for name, value in entry['before'].items()
                    if name in now and value.shape == now[name].shape and value.dtype == now[name].dtype
                }
        return {}

    @torch.no_grad()
    def give_back(self, flag: Tensor) -> None:
        """Where ``flag`` is up, the buffers become what they were. No host read.

        Args:
            flag: float32 scalar on any device.
        """
        if self._loaded and not self._ended:
            self._flag = flag if self._flag is None else torch.maximum(self._flag, flag.to(self._flag.device))
        for copies in self._held.values():
            for entry in copies.values():
                if entry.is_ours():
                    _give_back(entry.mean, entry.copy, flag)

    def release(self) -> None:
        """The window ends."""
        self._held = WeakKeyDictionary()
        if self._loaded:
            self._ended += 1
            if self._ended > LATEST:
                self._loaded.clear()

    def state(self) -> list[dict[str, dict[str, Tensor]]]:
        """For a checkpoint, of each average: its buffers ``before`` the window, and ``now``, by name. Syncs."""
        found = [
            {
                'before': {entry.name: entry.copy.detach().clone() for entry in copies.values()},
                'now': {entry.name: entry.mean.detach().clone() for entry in copies.values()},
            }
            for copies in self._held.values()
            if any(entry.is_ours() and not same_bits(entry.copy, entry.mean) for entry in copies.values())
        ]
        waiting = [] if self._ended else self._loaded
        return found + [{key: dict(values) for key, values in entry.items()} for entry in waiting]

    def load(self, averages: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Continue a window.

        Args:
            averages: From :meth:`state`. An average takes its copies up at its next update; what fits none is left out.
        """
        self._held, self._seen = WeakKeyDictionary(), WeakSet()
        self._loaded, self._ended, self._flag = list(averages), 0, None


def _give_back(mean: Tensor, copy: Tensor, flag: Tensor | None) -> None:
    if flag is not None and form_of(mean) == form_of(copy):
        mean.data.copy_(selected(copy, mean, flag))


__all__ = ['AveragedBuffers']
