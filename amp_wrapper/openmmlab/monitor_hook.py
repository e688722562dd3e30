"""``AmpMonitorHook``: numbers of mixed precision in every log, and reports on steps that are skipped."""

from __future__ import annotations

import copy
import os.path as osp
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from torch import Tensor, nn

from ..diagnostics.diagnosis import Diagnosis
from ..diagnostics.diagnosis_page import publish
from ..diagnostics.measured_numbers import NUMBERS
from ..diagnostics.monitor import LayerRanges, Monitor, check_interval, is_due, low_precision, numbers_of
from ..diagnostics.overflow import MOST_REPORTS, OverflowDiagnosis, check_mode, check_reports
from ..diagnostics.records import JsonLines
from ..diagnostics.sandbox import Attach
from ..engine import Engine
from ..registry import HOOKS
from . import attaching
from .wrappers import inner_model, wrappers_of

#: The folder of reports, beside the checkpoints.
FOLDER = 'amp_diagnosis'
#: Under this name mmengine's message hub saves, for each wrapper, the counters of steps at the last measurement, and whether
#: the next step is measured, and per layer too: five whole numbers.
STATE = 'amp_monitor'


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

    # before the logger reads
    priority = 'NORMAL'

    def __init__(
        self,
        interval: int | None = None,
        ranges_interval: int | None = None,
        diagnose_overflow: bool = True,
        max_reports: int = MOST_REPORTS,
    ) -> None:
        self._interval = None if interval is None else check_interval('interval', interval)
        self._ranges_interval = None if ranges_interval is None else check_interval('ranges_interval', ranges_interval)
        if self._interval is None:
            self._interval = self._ranges_interval
        self._diagnoses = check_mode(diagnose_overflow)
        self._max_reports = check_reports(max_reports)
        self._watched: list[tuple[Engine, Any]] = []
        self._files: dict[str, JsonLines] = {}
        self._layers: list[tuple[str, int, LayerRanges]] = []
        self._due: dict[str, tuple[bool, bool]] = {}
        self._monitors: dict[str, Monitor] = {}

    def before_train(self, runner: Any) -> None:
        """Begin to watch."""
        # of a training that an exception has ended
        self._release()
        self._monitors.clear()
        self._due.clear()
        wrappers = wrappers_of(runner)
        model = inner_model(runner.model)
        for name, wrapper in wrappers.items():
            engine = wrapper._engine
            if not wrapper.policy.enabled:
                continue
            if self._interval is not None and low_precision(wrapper.policy) is not None:
                self._watch(engine, self._monitor(runner, name, wrapper))
            if self._diagnoses and engine.scales.check:
                attach = attach_members({key: each._engine for key, each in wrappers.items()}, name)
                self._watch(engine, self._diagnosis(runner, name, wrapper, model, attach))

    def _watch(self, engine: Engine, observer: Any) -> None:
        engine.observers.append(observer)
        self._watched.append((engine, observer))

    def _monitor(self, runner: Any, name: str, wrapper: Any) -> Monitor:
        engine = wrapper._engine

        def take(row: Tensor) -> None:
            if runner.rank == 0:
                there = numbers_of(engine)
                names = {wrapper.log_prefix + name: at for at, name in enumerate(NUMBERS) if name in there}
                wrapper.device_log.update(row, names)

        def take_layers(ranges: LayerRanges) -> None:
            if runner.rank == 0:
                self._layers.append((name, runner.iter + 1, ranges))

        monitor = Monitor(lambda: self._due.pop(name, (False, False)), take, take_layers, is_wanted=runner.rank == 0)
        state = (runner.message_hub.get_info(STATE) or {}).get(name)
        if state is not None and runner.iter:
            *start, measured, layers = state
            counts = engine.scales.steps.counts
            monitor.window_start = torch.tensor(start, dtype=counts.dtype, device=counts.device)
            self._due[name] = bool(measured), bool(layers)
        self._monitors[name] = monitor
        return monitor

    def _diagnosis(self, runner: Any, name: str, wrapper: Any, model: nn.Module, attach: Attach) -> OverflowDiagnosis:
        def write(found: Diagnosis) -> str:
            rank = get_rank()
            if found.cause == 'other_rank' and rank:
                # one report without a cause is enough
                return ''
            stem = f'iter_{runner.iter + 1}' + (f'_{name}' if name else '') + (f'_rank{rank}' if rank else '')
            facts = {'iteration': runner.iter + 1, 'epoch': runner.epoch + 1, 'rank': rank}
            if name:
                facts['optimizer'] = name
            return publish(found, osp.join(runner.work_dir, FOLDER), stem, facts, low_precision(wrapper.policy))

        return OverflowDiagnosis([model], attach, write, self._max_reports, around=_own_message_hub)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Say whether the next step is measured. By the iteration, so that a resumed run measures the same ones."""
        if self._interval is not None and is_due(runner.iter + 1, self._interval):
            layers = self._ranges_interval is not None and is_due(runner.iter + 1, self._ranges_interval)
            for name in wrappers_of(runner):
                self._due[name] = (True, layers or self._due.get(name, (False, False))[1])

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Write what has reached the host."""
        self._write_layers(runner, wait=False)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Save where the last measurement was, so that a resumed run has the same numbers. Syncs."""
        state = {
            name: [*monitor.window_start.tolist(), *map(int, self._due.get(name, (False, False)))]
            for name, monitor in self._monitors.items()
            if monitor.window_start is not None
        }
        hub = checkpoint.get('message_hub')
        if state and isinstance(hub, dict):
            hub['runtime_info'] = {**hub['runtime_info'], STATE: state}
            hub['resumed_keys'] = {**hub['resumed_keys'], STATE: True}

    def after_train(self, runner: Any) -> None:
        """Take the hooks off the model."""
        self._write_layers(runner, wait=True)
        self._release()

    def _release(self) -> None:
        for engine, observer in self._watched:
            if isinstance(observer, OverflowDiagnosis):
                observer.disarm()
            if observer in engine.observers:
                engine.observers.remove(observer)
        self._watched.clear()

    def _write_layers(self, runner: Any, wait: bool) -> None:
        while self._layers and (wait or self._layers[0][2].is_there):
            name, iteration, ranges = self._layers.pop(0)
            if name not in self._files:
                file = f'{name}_amp_ranges.jsonl' if name else 'amp_ranges.jsonl'
                self._files[name] = JsonLines(osp.join(runner.log_dir, 'vis_data', file))
            self._files[name].append({'iteration': iteration, **ranges.plain()})


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
