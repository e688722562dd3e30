"""``AmpMonitorHook``: numbers of mixed precision in every log, and reports on steps that are skipped."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from torch import nn

from ..diagnostics.measured_numbers import NUMBERS
from ..diagnostics.overflow import MOST_REPORTS
from ..diagnostics.sandbox import Attach
from ..diagnostics.training_monitor import MonitorOptions, TrainingMonitor
from ..engine import Engine
from ..registry import HOOKS
from . import attaching
from .attaching import inner_model, wrappers_of


@HOOKS.register_module()
class AmpMonitorHook(Hook):
    """Logs how well the types of a training fit, and finds the cause of skipped steps.

    ``default_hooks=dict(amp_monitor=dict(type='amp_wrapper.AmpMonitorHook', interval=50))``; ``tools/train.py`` adds one
    without an ``interval``. ``train/amp_scale`` and ``train/amp_skipped`` need no hook. With an interval the log, and so every
    visualizer, gets the numbers of :data:`amp_wrapper.diagnostics.measured_numbers.MEANINGS` as well. They are computed on the
    device and read with the log. O0 has none.

    Args:
        interval: Iterations from one measurement to the next: iterations 1, ``interval``, 2 * ``interval`` and so on are
            measured, so that a row of the log at such an iteration has its numbers. While gradients are accumulated, the next
            step that is taken is measured. None is that of ``ranges_interval``, or measures nothing.
        ranges_interval: The same for measurements per layer, at iterations that are measured, each a line of
            ``vis_data/amp_ranges.jsonl``; None for none.
        diagnose_overflow: Whether skipped steps are examined, the first one on. For that, each step keeps references to its
            inputs, which takes a tenth of a millisecond or so. That a dynamic loss scale falls is not reported.
        max_reports: Reports of one training, in the folder ``amp_diagnosis`` of the work dir.

    Raises:
        AmpConfigError: An interval that is no whole number above 0; another ``diagnose_overflow``.
    """

    # before AmpRunnerHook brings the numbers to the log
    priority = 'ABOVE_NORMAL'

    def __init__(
        self,
        interval: int | None = None,
        ranges_interval: int | None = None,
        diagnose_overflow: bool = True,
        max_reports: int = MOST_REPORTS,
    ) -> None:
        self._options = MonitorOptions.read(
            interval=interval,
            ranges_interval=ranges_interval,
            diagnose_overflow=diagnose_overflow,
            max_reports=max_reports,
        )
        self._watches: dict[str, TrainingMonitor] = {}

    def before_train(self, runner: Any) -> None:
        """Begin to watch."""
        # of a training that an exception has ended
        self.after_train(runner)
        wrappers = wrappers_of(runner)
        for name, wrapper in wrappers.items():
            if not wrapper.policy.enabled:
                continue
            names = {f'{wrapper.log_prefix}{number}': at for at, number in enumerate(NUMBERS)}
            take = partial(wrapper.device_log.update, names=names)
            watch = TrainingMonitor(self._options, Path(runner.log_dir, 'vis_data'), Path(runner.work_dir), name, take)
            attach = attach_members({key: each._engine for key, each in wrappers.items()}, name)
            watch.watch(wrapper._engine, [inner_model(runner.model)], attach, _own_message_hub)
            self._watches[name] = watch

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Say which iteration comes, so that a resumed run measures the same ones."""
        for watch in self._watches.values():
            watch.begin(runner.iter + 1, epoch=runner.epoch + 1)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Write what has reached the host."""
        for watch in self._watches.values():
            watch.hand_on()

    def after_train(self, runner: Any) -> None:
        """Take the hooks off the model."""
        while self._watches:
            self._watches.popitem()[1].close()


@contextmanager
def _own_message_hub() -> Iterator[None]:
    """What a copy of a model writes to mmengine's message hub is forgotten."""
    hub = MessageHub.get_current_instance()
    kept = hub._runtime_info, hub._log_scalars
    hub._runtime_info, hub._log_scalars = copy.deepcopy(kept)
    try:
        yield
    finally:
        hub._runtime_info, hub._log_scalars = kept


def attach_members(members: Mapping[str, Engine], chosen: str) -> Attach:
    """Attaches copies of a model as the optimizer wrappers of a runner have attached the model.

    Args:
        members: The engine of each wrapper, by its name; under '' a single one.
        chosen: The one whose level is varied.
    """

    def attach(engine: Engine, copied: nn.Module) -> None:
        if len(members) == 1:
            attaching.attach(engine, copied)
            return
        by_name = dict(copied.named_parameters())
        owned = {
            name: [by_name[engine.name(weight)] for weight in engine.weights() if engine.name(weight) in by_name]
            for name, engine in members.items()
        }
        for name, other in members.items():
            policy = engine.policy if name == chosen else other.policy
            if owned[name]:
                # it steps nothing: it says which parameters are whose
                member = Engine(policy, torch.optim.SGD(owned[name], lr=0.0))
                foreign = [p for other, mine in owned.items() if other != name for p in mine]
                attaching.attach(member, copied, foreign)

    return attach
