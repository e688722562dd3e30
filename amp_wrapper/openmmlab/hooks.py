"""mmengine hooks of this package: testing at a level, the first non-finite module, and why steps are skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from torch import Tensor, nn

from ..casting import cast_module
from ..casting.rule import Rule, rule_of
from ..diagnostics.sandbox import Attach
from ..diagnostics.watch import OPTIONS, TrainingWatch
from ..diagnostics.watches import NonfiniteWatch, copied_batch, named_tensors
from ..engine import Engine, detach
from ..errors import NonfiniteError
from ..policy import OptLevel, resolve
from ..policy.options import read_options
from ..registry import HOOKS
from . import attaching
from .attaching import cast_data_element, inner_model, wrappers_of


@HOOKS.register_module()
class AmpInferenceHook(Hook):
    """Run testing at an opt level. ``Runner.test`` builds no optimizer wrapper, so without this it runs in FP32.

    O1 and O4 autocast every forward of the model; the others cast it, as in training. Predictions are FP32 at every level,
    unless ``cast_model_outputs`` says otherwise. After the test, the model is what it was before, so that a training may come
    before or after it in the same process. What is tested are the FP32 values of the model, also where it trains at a level.

    Args:
        opt_level: 'O0' to 'O5'.
        **overrides: Further properties of :func:`amp_wrapper.policy.resolve`.

    Raises:
        AmpConfigError: A configuration that cannot mean anything.
        AmpUsageError: A test while accumulated gradients of a training wait for their step.
    """

    priority = 'VERY_HIGH'

    def __init__(self, opt_level: OptLevel = 'O2', **overrides: Any) -> None:
        self.policy = resolve(opt_level, **overrides)
        self._engine: Engine | None = None
        self._before: dict[str, Tensor] = {}

    def before_run(self, runner: Any) -> None:
        """Take off what a test has left that an exception ended."""
        self.after_test(runner)

    def before_test(self, runner: Any) -> None:
        """Cast the loaded model."""
        self.after_test(runner)
        for wrapper in wrappers_of(runner).values():
            # it attaches again when the training goes on
            wrapper.detach()
        model = inner_model(runner.model)
        if self.policy.casts_model:
            # without an optimizer, casts keep no FP32 values
            self._before = {name: tensor.detach().clone() for name, tensor in named_tensors(model)}
        self._engine = Engine(self.policy, None)
        attaching.attach(self._engine, model)
        if self.policy.enabled and self.policy.autocast_dtype is not None:
            outputs = self.policy.cast_model_outputs or torch.float32
            rule = rule_of(model) or Rule()
            changes: dict[str, Any] = dict(sets_autocast=True, autocast=self.policy.autocast_dtype, outputs=outputs)
            cast_module.put(model, dataclasses.replace(rule, only_eval=False, enter=cast_data_element, **changes))
        runner.logger.info(f'amp: testing at {self.policy.describe()}')

    @torch.no_grad()
    def after_test(self, runner: Any) -> None:
        """Give the model back as it was before the test."""
        if self._engine is None:
            return
        detach(self._engine)
        for name, tensor in named_tensors(inner_model(runner.model)):
            if name in self._before:
                tensor.copy_(self._before[name])
        self._engine, self._before = None, {}


@HOOKS.register_module()
class NonfiniteHook(Hook):
    """Names the first module whose output is not finite in a training iteration: where a NaN comes from.

    ``default_hooks=dict(nonfinite=dict(type='amp_wrapper.NonfiniteHook'))``. It reads the device once an iteration and
    costs one reduction per module, so take it out again once the place is known.

    Args:
        stop: Whether to end the training there with :class:`~amp_wrapper.NonfiniteError`, instead of a warning line.
    """

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop
        self._watch: NonfiniteWatch | None = None

    def before_train(self, runner: Any) -> None:
        """Begin to watch."""
        # of a training that an exception has ended
        self.after_train(runner)
        self._watch = NonfiniteWatch(inner_model(runner.model))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Report what this iteration showed."""
        place = None if self._watch is None else self._watch.first()
        if place is not None:
            line = f'iteration {runner.iter + 1}: the first non-finite values are in the output of {place}'
            line = line.replace("the output of the model's input", "the model's input")
            if self.stop:
                raise NonfiniteError(f'{line}. Keep that module in FP32 (keep_fp32=[...]) or look at its data.')
            runner.logger.warning(f'amp: {line}')

    def after_train(self, runner: Any) -> None:
        """Take the hooks off the model."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


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
        wrappers, model = wrappers_of(runner), [inner_model(runner.model)]
        engines = {name: wrapper._engine for name, wrapper in wrappers.items()}
        for name, wrapper in wrappers.items():
            if wrapper.policy.enabled:
                logs = {'the visualizer': partial(_show, runner, wrapper.log_prefix.removeprefix('train/'))}
                words: Any = dict(reports=Path(runner.work_dir), name=name, around=_own_message_hub)
                attach = attach_members(engines, name)
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
        by_name, made = dict(copied.named_parameters()), list[Engine]()
        for name, other in members.items():
            policy = engine.policy if name == chosen else other.policy
            owned = [by_name[other.name(weight)] for weight in other.weights() if other.name(weight) in by_name]
            if owned:
                # it steps nothing: it says which parameters are whose
                made.append(Engine(policy, torch.optim.SGD(owned, lr=0.0)))
        for member in made:
            member.join(other for other in made if other is not member)
        attaching.attach_members(made[0], copied)

    return attach
