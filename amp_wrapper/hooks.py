"""mmengine hooks of this package."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import BaseAveragedModel, BaseDataPreprocessor, is_model_wrapper

from . import casting, policy
from .engine import AmpEngine
from .registry import HOOKS


@HOOKS.register_module()
class AmpInferenceHook(Hook):
    """Run testing at an opt level. ``Runner.test`` builds no optimizer wrapper, so without this it runs in FP32.

    O1 and O4 autocast every forward of the model; the others cast it, as in training.

    Args:
        opt_level: 'O0' to 'O5'.
        **overrides: Further properties of :func:`amp_wrapper.policy.resolve`.

    Raises:
        AmpConfigError: A configuration that cannot mean anything.
    """

    priority = 'VERY_HIGH'

    def __init__(self, opt_level: str = 'O2', **overrides: Any) -> None:
        self.policy = policy.resolve(opt_level, **overrides)
        self._engine: AmpEngine | None = None

    def before_test(self, runner: Any) -> None:
        """Cast the loaded model."""
        if self._engine is not None:
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._engine = AmpEngine(self.policy, None)
        self._engine.attach(model, leave=(BaseDataPreprocessor,), average=(BaseAveragedModel,))
        if self.policy.enabled and self.policy.autocast_dtype is not None:
            casting.autocast_forward(model, self.policy.autocast_dtype)
        runner.logger.info(f'amp: testing at {self.policy.describe()}')
