"""``AmpMonitorHook``: reports on steps that are skipped, and on request how large gradients are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from torch import nn

from ..diagnostics.sandbox import Attach, read_options
from ..diagnostics.watch import OPTIONS, TrainingWatch
from ..diagnostics.watches import copied_batch
from ..engine import Engine
from ..registry import HOOKS
from . import attaching
from .attaching import inner_model, wrappers_of


@HOOKS.register_module()
class AmpMonitorHook(Hook):
    """Finds the cause of skipped steps, and on request measures how well gradients fit into float16.

    ``default_hooks=dict(amp_monitor=dict(type='amp_wrapper.AmpMonitorHook', interval=50))``; ``tools/train.py`` adds one
    without an ``interval``. ``train/amp_scale`` and ``train/amp_skipped`` need no hook. With an interval the visualizer gets
    the ``amp_grad`` numbers of :class:`~amp_wrapper.TrainingWatch` as well, at the iterations at which they were measured,
    where the level computes in float16.

    Args:
        interval: Iterations from one measurement to the next: iterations 1, ``interval``, 2 * ``interval`` and so on are
            measured. While gradients are accumulated, the next step that is taken is measured. None measures nothing.
        diagnose_overflow: Whether skipped steps are examined, the first one on, with reports in the folder ``amp_diagnosis`` of
            the work dir. For that, each step keeps references to its inputs, which takes some tenths of a millisecond. That a
            dynamic loss scale falls is not reported.

    Raises:
        AmpConfigError: An interval that is no whole number above 0; another ``diagnose_overflow``.
    """

    def __init__(self, interval: int | None = None, diagnose_overflow: bool = True) -> None:
        self._options = read_options(OPTIONS, {'interval': interval, 'diagnose_overflow': diagnose_overflow})
        self._watches: list[TrainingWatch] = []

    def before_train(self, runner: Any) -> None:
        """Begin to watch."""
        # of a training that an exception has ended
        self.after_train(runner)
        wrappers = wrappers_of(runner)
        engines = {name: wrapper._engine for name, wrapper in wrappers.items()}
        for name, wrapper in wrappers.items():
            if wrapper.policy.enabled:
                logs = {'the visualizer': partial(_show, runner, wrapper.log_prefix.removeprefix('train/'))}
                words: Any = dict(reports=Path(runner.work_dir), name=name, around=_own_message_hub)
                attach = attach_members(engines, name)
                model = [inner_model(runner.model)]
                self._watches.append(TrainingWatch(engines[name], model, attach, self._options, logs, **words))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Say which iteration comes, so that a resumed run measures the same ones."""
        for watch in self._watches:
            watch.begin(runner.iter + 1)

    def after_train(self, runner: Any) -> None:
        """Watch no longer."""
        while self._watches:
            self._watches.pop().close()


def _show(runner: Any, prefix: str, iteration: int, numbers: Mapping[str, float]) -> None:
    """Give the visualizer what was measured. The line of the log, and the names it has already, stay as they are."""
    found = {f'{prefix}{name}': number for name, number in numbers.items() if name.startswith('amp_grad')}
    if found:
        runner.visualizer.add_scalars({**found, 'iter': iteration}, step=iteration)


@contextmanager
def _own_message_hub() -> Iterator[None]:
    """What a copy of a model writes to mmengine's message hub is forgotten."""
    hub = MessageHub.get_current_instance()
    kept = hub._runtime_info, hub._log_scalars
    hub._runtime_info, hub._log_scalars = map(copied_batch, kept)
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
