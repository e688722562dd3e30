"""The optimizer's state dict with what mixed precision adds to it."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from .. import checkpoint
from ..casting.masters import keep_scalar_state
from ..checkpoint import report
from ..errors import AmpCheckpointError
from .base import EngineBase, Stage
from .gradients import saved_window as open_window

#: Doors decide where these lines go.
logger = logging.getLogger('amp_wrapper')


class Saving(EngineBase):
    """Writes and takes over state dicts."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict and, unless disabled, what :mod:`amp_wrapper.checkpoint` adds to it. Syncs."""
        assert self.optimizer is not None
        state: dict[str, Any] = self.optimizer.state_dict()
        if not self.policy.enabled:
            return state
        stock_shaped = self.policy.opt_level in ('O1', 'O4') and len(self.scalers) == 1
        return checkpoint.write(
            state,
            self.policy.to_dict(),
            [scaler.state_dict() for scaler in self.scalers],
            self._open_window(),
            stock_shaped,
        )

    def _open_window(self) -> checkpoint.Window | None:
        if self.stage is not Stage.ACCUMULATING:
            return None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1 and not self._reducers.same_everywhere():
            self._say(
                logging.WARNING,
                'amp: saved inside an accumulation window of several processes: the gradients of the open window are '
                'not in the checkpoint. Save at the end of a window for an exact resume.',
            )
            return None
        return open_window.save(
            list(zip(self.weights(), self._parameters())),
            self._sums,
            self._on_arrival,
            self._flags,
            self._buffers,
        )

    def _say(self, level: int, line: str) -> None:
        if self.policy.verbosity >= 1:
            logger.log(level, line)

    def check_state_dict(self, state: Mapping[str, Any]) -> checkpoint.SavedAmp:
        """Whether a state dict can be taken over, applying nothing.

        Args:
            state: As for :meth:`load_state_dict`.

        Raises:
            AmpCheckpointError: Names the key and what was expected.
        """
        assert self.optimizer is not None
        form = checkpoint.own_form(self.optimizer)
        saved = checkpoint.read(state, form)
        if form is not None:
            return saved
        checkpoint.check_optimizer_state(saved, self.optimizer)
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take over a state dict; before or after :meth:`attach`.

        Args:
            state: From :meth:`state_dict`, from mmengine's stock wrappers, from apex or from a bare optimizer. Not changed, and
                not aliased.

        Returns:
            At most one line each for what was kept, converted, dropped, and begun anew.

        Raises:
            AmpCheckpointError: Nothing has been applied.
        """
        assert self.optimizer is not None
        saved = self.check_state_dict(state)
        try:
            # torch aliases tensors of the right type: without a copy, training would write into the caller's dict
            self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise AmpCheckpointError(
                f'the optimizer state does not fit {type(self.optimizer).__name__}: {error}'
            ) from error
        if not self.policy.enabled:
            dropped = [] if saved.kind == 'plain' else ['the loss scale, for mixed precision is off']
            return report.describe(saved, self.policy, [], dropped)
        if 'param_groups' in saved.optimizer:
            keep_scalar_state(self.optimizer, saved.optimizer)
        self._pending = None
        if self.attached:
            self.zero_grad()
        scales, dropped = self._load_scalers(saved)
        self._watch.start(int(self.scalers[0].counts[2]))
        if saved.window is not None:
            if not report.window_fits(saved, self.policy):
                dropped.append('the gradients of the open accumulation window, which belong to another configuration')
            elif self.attached:
                self._restore_window(saved)
            else:
                # the window alone: a second copy of the optimizer state would wait in memory for nothing
                self._pending = dataclasses.replace(saved, optimizer={}, window=copy.deepcopy(saved.window))
        new = [scaler.get_scale() for scaler in self.scalers[len(saved.loss_scalers) :] if scaler.is_dynamic]
        return report.describe(saved, self.policy, scales, dropped, new)

    def _load_scalers(self, saved: checkpoint.SavedAmp) -> tuple[list[float], list[str]]:
        """Returns the scales that were taken over, and a phrase for each thing that was not."""
        dropped: list[str] = []
        scales: list[float] = []
        for index, (scaler, state) in enumerate(zip(self.scalers, saved.loss_scalers)):
            label = f'loss {index}: ' if len(self.scalers) > 1 else ''
            dropped += [label + note for note in scaler.load_state_dict(state)]
            if scaler.is_dynamic and state.get('dynamic', True) and state:
                scales.append(scaler.get_scale())
        further = [f'{state["scale"]:g}' for state in saved.loss_scalers[len(self.scalers) :] if state]
        if further:
            dropped.append(f'the loss scales {", ".join(further)} of further losses, for which none is configured')
        return scales, dropped

    def _restore_window(self, saved: checkpoint.SavedAmp) -> None:
        window = saved.window
        assert window is not None
        open_window.restore(window, list(zip(self.weights(), self._parameters())), self._sums)
        self._flags.restore(window.used, window.found_inf, window.foreign_found_inf)
        if self._buffers is not None:
            self._buffers.load(window.buffers, window.averages)
        self.stage = Stage.ACCUMULATING
        self._say(
            logging.INFO,
            'amp: the gradients of the open accumulation window were in the checkpoint and are back: nothing of it is lost',
        )
