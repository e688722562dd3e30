"""Buffers of averages that are updated while gradients accumulate: a skipped step gives them back, too.

An average that is updated after each iteration, as mmengine's EMAHook does it, takes up what a batch with NaN has left in the
model's buffers before the step comes that is skipped. The model's buffers return then; a mean that was NaN once stays NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .buffer_copies import form_of, is_tracked, same_bits, selected


class AveragedBuffers:
    """Copies of the buffers of averages, from before their first update in a window of accumulated batches."""

    def __init__(self) -> None:
        # of each average by id: the name of the buffer, the buffer, and its copy
        self._held: WeakKeyDictionary[nn.Module, dict[int, tuple[str, Tensor, Tensor]]] = WeakKeyDictionary()
        # of a checkpoint, until the averages are seen: in a file, they have no name
        self._loaded: list[Mapping[str, Mapping[str, Tensor]]] = []
        # whether the window that was loaded has ended meanwhile, and how
        self._ended = False
        self._flag: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether averages of a checkpoint have not been seen yet."""
        return bool(self._loaded)

    @torch.no_grad()
    def hold(self, average: nn.Module, means: Mapping[str, Tensor], opens: bool) -> None:
        """Copy buffers that are about to be averaged, unless an earlier update of the window has copied them.

        Syncs at the first update after a checkpoint was loaded inside of a window.

        Args:
            average: A copy of the model.
            means: Its buffers by name; of any type, on any device.
            opens: Whether there is a window.
        """
        before = self._find(means) if self._loaded else {}
        if self._ended and before:
            # the step came between the checkpoint and this update
            for name, copy in before.items():
                _give_back(means[name], copy, self._flag)
            before = {}
        if not opens:
            return
        held = self._held.setdefault(average, {})
        for name, mean in means.items():
            if id(mean) not in held and is_tracked(mean):
                held[id(mean)] = (name, mean, before[name] if name in before else mean.detach().clone())

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
    def release(self, flag: Tensor | None) -> None:
        """The window ends: where ``flag`` is up, the buffers become what they were. No host read.

        Args:
            flag: float32 scalar on any device; None for a step that is taken.
        """
        held, self._held = self._held, WeakKeyDictionary()
        if self._loaded and not self._ended:
            self._ended, self._flag = True, flag
        for copies in held.values():
            for _, mean, copy in copies.values():
                _give_back(mean, copy, flag)

    def state(self) -> list[dict[str, dict[str, Tensor]]]:
        """For a checkpoint, of each average: its buffers ``before`` the window, and ``now``, by name. Syncs."""
        found = [
            {
                'before': {name: copy.detach().clone() for name, _, copy in copies.values()},
                'now': {name: mean.detach().clone() for name, mean, _ in copies.values()},
            }
            for copies in self._held.values()
            if any(not same_bits(copy, mean) for _, mean, copy in copies.values())
        ]
        waiting = [] if self._ended else self._loaded
        return found + [{key: dict(values) for key, values in entry.items()} for entry in waiting]

    def load(self, averages: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Continue a window.

        Args:
            averages: From :meth:`state`. An average takes its copies up at its next update; what fits none is left out.
        """
        self._held = WeakKeyDictionary()
        self._loaded, self._ended, self._flag = list(averages), False, None


def _give_back(mean: Tensor, copy: Tensor, flag: Tensor | None) -> None:
    if flag is not None and form_of(mean) == form_of(copy):
        mean.data.copy_(selected(copy, mean, flag))


__all__ = ['AveragedBuffers']
