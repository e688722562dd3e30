"""mmengine hooks of this package."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from mmengine.hooks import Hook
from torch import Tensor

from ..casting import cast_module
from ..casting.rule import Rule, rule_of
from ..diagnostics.watches import NonfiniteWatch, named_tensors
from ..engine import Engine, detach
from ..errors import NonfiniteError
from ..policy import OptLevel, resolve
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
