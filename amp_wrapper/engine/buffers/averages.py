"""Restores the buffers of weight averages after a skipped step, where averages are updated while gradients accumulate.

An average that is updated after each iteration, as mmengine's EMAHook does it, averages the NaN that a batch has left in the
model's buffers before the step comes that is skipped. That step restores the model's buffers; a mean that was NaN once would
stay NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .copies import form_of, is_tracked, same_bits, selected

#: Steps after which averages of a checkpoint that were not updated any more are forgotten.
LATEST = 1000


@dataclasses.dataclass
class _Mean:
    """A buffer of an average: its name, itself, its copy, and its version after the last update."""

    name: str
    tensor: Tensor
    copy: Tensor
    version: int = -1

    def is_ours(self) -> bool:
        """Whether nobody else has written to it since the last update."""
        return self.version in (-1, self.tensor._version)


class AveragedBuffers:
    """Copies of the buffers of averages, from before their first update in a step of accumulated batches.

    Args:
        averages: From :meth:`state`, where a step goes on that was saved. An average takes its copies up at its next update;
            what fits none is left out.
    """

    def __init__(self, averages: Sequence[Mapping[str, Mapping[str, Tensor]]] = ()) -> None:
        # of each average, by id of the buffer
        self._means: WeakKeyDictionary[nn.Module, dict[int, _Mean]] = WeakKeyDictionary()
        # of a checkpoint, until the averages are seen: in a file, they have no name
        self._loaded = list(averages)
        self._seen: WeakSet[nn.Module] = WeakSet()
        # how many steps have ended since, and how the one that was loaded did
        self._ended = 0
        self._flag: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether averages of a checkpoint have not been seen yet."""
        return bool(self._loaded)

    def hold(self, average: nn.Module, means: Mapping[str, Tensor], is_live: bool) -> None:
        """Copy buffers that are about to be averaged, unless an earlier update since the last step has copied them.

        Syncs at the first update of each average after a checkpoint was loaded that was saved between two steps.

        Args:
            average: A copy of the model.
            means: Its buffers by name; of any type, on any device.
            is_live: Whether a step is under way.
        """
        before: dict[str, Tensor] = {}
        if self._loaded and average not in self._seen:
            self._seen.add(average)
            before = self._find(means)
        if self._ended:
            # the step came between the checkpoint and this update
            for name, copy in before.items():
                _give_back(means[name], copy, self._flag)
            before = {}
        if not is_live:
            return
        known = self._means.setdefault(average, {})
        for name, mean in means.items():
            # what somebody else has written since the last update stays
            if is_tracked(mean) and not (id(mean) in known and known[id(mean)].is_ours()):
                known[id(mean)] = _Mean(name, mean, before[name] if name in before else mean.detach().clone())

    def note(self, average: nn.Module) -> None:
        """The update has ended."""
        for mean in self._means.get(average, {}).values():
            mean.version = -1 if mean.tensor.is_inference() else mean.tensor._version

    def _find(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loaded copies of an average: those of the one that looked like it when the checkpoint was saved."""
        for entry in self._loaded:
            now = {name: value.to(means[name].device) for name, value in entry['now'].items() if name in means}
            if len(now) == len(entry['now']) and all(same_bits(value, means[name]) for name, value in now.items()):
                self._loaded = [other for other in self._loaded if other is not entry]
                return {
                    name: value.to(means[name].device, copy=True)
                    for name, value in entry['before'].items()
                    if name in now and value.shape == now[name].shape and value.dtype == now[name].dtype
                }
        return {}

    def give_back(self, flag: Tensor) -> None:
        """Where ``flag`` is up, the buffers become what they were. No host read.

        Args:
            flag: float32 scalar on any device.
        """
        if self._loaded and not self._ended:
            self._flag = flag if self._flag is None else torch.maximum(self._flag, flag.to(self._flag.device))
        for means in self._means.values():
            for mean in means.values():
                if mean.is_ours():
                    _give_back(mean.tensor, mean.copy, flag)

    def release(self) -> None:
        """The step ends."""
        self._means.clear()
        self._ended += 1
        if self._ended > LATEST:
            self._loaded.clear()

    def state(self) -> list[dict[str, dict[str, Tensor]]]:
        """For a checkpoint, of each average: its buffers ``before`` the step, and ``now``, by name. Syncs."""
        found = [
            {
                'before': {mean.name: mean.copy.detach().clone() for mean in means.values()},
                'now': {mean.name: mean.tensor.detach().clone() for mean in means.values()},
            }
            for means in self._means.values()
            if any(mean.is_ours() and not same_bits(mean.copy, mean.tensor) for mean in means.values())
        ]
        waiting = [] if self._ended else self._loaded
        return found + [{key: dict(values) for key, values in entry.items()} for entry in waiting]


def _give_back(mean: Tensor, copy: Tensor, flag: Tensor | None) -> None:
    if flag is not None and form_of(mean) == form_of(copy):
        mean.data.copy_(selected(copy, mean, flag))
