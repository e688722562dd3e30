"""Reads an mmengine config, and builds its model, optimizer, batches and loss without a runner."""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.optim import AmpOptimWrapper as TorchAmpOptimWrapper
from mmengine.optim import ApexOptimWrapper as StockApexOptimWrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from mmengine.registry import MODELS, OPTIM_WRAPPERS, DefaultScope
from mmengine.runner import Runner, set_random_seed
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmengine.runner.checkpoint import _load_checkpoint, _load_checkpoint_to_model
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import convert, random_state
from ..engine import Engine
from ..errors import AmpConfigError, AmpUsageError, one_line
from ..policy import Policy, resolve
from . import attaching
from .optim_wrapper import AmpOptimWrapper

_SCRIPT = 'use amp.report(...) or amp.suggest_level(...) in a script that has the model and the loss'
#: Options of a ``DataLoader`` that are about its worker processes.
_WORKERS = ('num_workers', 'persistent_workers', 'prefetch_factor', 'multiprocessing_context', 'timeout')


def read_config(path: str, options: Sequence[str] | None = None) -> Config:
    """Read a config file.

    Args:
        path: Of a text config or a pure Python one.
        options: Entries to override, each ``'KEY=VALUE'`` with a dotted key.

    Raises:
        AmpUsageError: There is no such file.
        AmpConfigError: The file is no config, or the options do not fit it.
        ImportError: The config imports a module that cannot be imported.
    """
    if not Path(path).is_file():
        raise AmpUsageError(f'the config {path!r} is no file.')
    try:
        cfg = Config.fromfile(path)
    except ImportError:
        # only the traceback names the module
        raise
    except Exception as error:
        # a config is a program, which may raise anything
        raise AmpConfigError([f'{path} cannot be read as a config: {one_line(error)}']) from error
    parsed = argparse.Namespace(options={})
    try:
        DictAction(['--cfg-options'], 'options')(argparse.ArgumentParser(), parsed, options)
        cfg.merge_from_dict(parsed.options)
    except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
        raise AmpConfigError([f'--cfg-options must be KEY=VALUE that fit the config: {one_line(error)}']) from error
    return cfg


def check_exists(checkpoint: str) -> None:
    """Look whether a checkpoint is there. URLs pass.

    Raises:
        AmpUsageError: It is not.
    """
    is_url = '://' in checkpoint or checkpoint.startswith('s3:')
    if not is_url and not Path(checkpoint).exists():
        raise AmpUsageError(f'the checkpoint {checkpoint!r} does not exist.')


class FromConfig:
    """Builds what a config trains. No folder and no log file is made; random states are as before.

    Args:
        path: Of the config.
        options: Entries to override, each ``'KEY=VALUE'`` with a dotted key.
        checkpoint: A path or a URL; the config's ``load_from`` by default. Without one, the weights are those that training
            begins with.
        device: The first GPU by default, or the CPU where there is none.

    Raises:
        AmpConfigError: The config cannot be read; it trains with several optimizers, or in a ``train_step`` of the model's
            own; an unknown device.
        AmpUsageError: The config or the checkpoint does not exist.
        AmpCheckpointError: The checkpoint cannot be read.

    Attributes:
        config: With the overridden entries.
        model: In FP32, initialised or loaded, in training mode, on its device.
        policy: Of the config's optimizer wrapper; that of O0 for mmengine's plain ``OptimWrapper``.
    """

    def __init__(
        self, path: str, options: Sequence[str] | None, checkpoint: str | None, device: str | None = None
    ) -> None:
        self.config = read_config(path, options)
        place = checkpoint or self.config.get('load_from')
        if place is not None:
            check_exists(place)
        device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
        with _building(self.config):
            model = _build_model(self.config)
            if place is not None:
                content = _load_checkpoint(str(place), map_location='cpu', logger='silent')
                _load_checkpoint_to_model(model, convert.to_weights(content, torch.float32)[0])
            try:
                self.model: nn.Module = model.to(device).train()
            except (RuntimeError, AssertionError) as error:
                raise AmpConfigError([f'--device {device}: {one_line(error)}']) from error
            self.policy: Policy = getattr(_build_wrapper(self.config, model), 'policy', None) or resolve('O0')

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Build the optimizer of the config.

        Args:
            model: :attr:`model` or a copy of it.
        """
        return _build_wrapper(self.config, model).optimizer

    def attach(self, engine: Engine, model: nn.Module) -> None:
        """Attach a copy of the model as training does, with the config's ``activation_checkpointing``.

        Args:
            engine: Not attached yet; with the optimizer of the copy.
            model: A copy of :attr:`model`.
        """
        if self.config.get('activation_checkpointing') is not None:
            turn_on_activation_checkpointing(model, self.config.activation_checkpointing)
        if self.config.get('efficient_conv_bn_eval') is not None:
            turn_on_efficient_conv_bn_eval(model, self.config.efficient_conv_bn_eval)
        attaching.attach(engine, model)

    def batches(self, count: int) -> list[Any]:
        """Read the first batches of the training data.

        Args:
            count: At least 1; fewer are returned where the data set has no more.

        Raises:
            AmpUsageError: The data cannot be read.
        """
        with _building(self.config):
            try:
                # a few batches need no worker processes
                loader_cfg = {key: value for key, value in self.config.train_dataloader.items() if key not in _WORKERS}
                loader = Runner.build_dataloader({**loader_cfg, 'num_workers': 0})
                found = list(itertools.islice(loader, count))
            except Exception as error:
                # a data set is a program, which may raise anything
                raise AmpUsageError(f'the training data cannot be read: {one_line(error)}') from error
        if not found:
            raise AmpUsageError('the training data set is empty.')
        return found

    def loss_fn(self, model: Any, batch: Any) -> Tensor:
        """Compute the loss of a batch as mmengine's ``train_step`` does.

        Args:
            model: :attr:`model` or a copy of it, attached or not.
            batch: Of :meth:`batches`; not changed.

        Returns:
            A scalar, with its graph.
        """
        with _scope(self.config):
            # preprocessors of some projects write into the samples
            data = model.data_preprocessor(copy.deepcopy(batch), True)
            losses = model._run_forward(data, mode='loss')
            # mmengine adds losses up outside of autocast
            with torch.autocast(next(model.parameters()).device.type, enabled=False):
                loss: Tensor = model.parse_losses(losses)[0]
                return loss


def _build_model(cfg: Config) -> BaseModel:
    model_cfg = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        model_cfg.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(model_cfg)
    if not isinstance(model, BaseModel) or type(model).train_step is not BaseModel.train_step:
        raise AmpConfigError([f'{type(model).__name__} has a train_step of its own, which may do anything: {_SCRIPT}.'])
    model.init_weights()
    return model


def _build_wrapper(cfg: Config, model: nn.Module) -> OptimWrapper:
    wrapper_cfg = copy.deepcopy(cfg.get('optim_wrapper') or {})
    wrapper = None
    if 'optimizer' in wrapper_cfg:
        with _building(cfg):
            kind = wrapper_cfg.get('type', OptimWrapper)
            kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
            if kind in (TorchAmpOptimWrapper, StockApexOptimWrapper):
                # they need a GPU or apex; this one takes their arguments, and GradScaler has no ceiling
                wrapper_cfg.update(type=AmpOptimWrapper, max_loss_scale=None)
            wrapper = build_optim_wrapper(model, wrapper_cfg)
    if wrapper is None or isinstance(wrapper, OptimWrapperDict):
        raise AmpConfigError([f'optim_wrapper must have one optimizer; for none or several, {_SCRIPT}.'])
    return wrapper


def _scope(cfg: Config) -> Any:
    """Look names up in the project of the config, as a run does."""
    return DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine'))


@contextmanager
def seeded(cfg: Config) -> Iterator[None]:
    """Begin random numbers with the seed of the config inside, and restore their states outside."""
    before = random_state.capture()
    try:
        set_random_seed((cfg.get('randomness') or {}).get('seed') or 0)
        yield
    finally:
        random_state.restore(before)


@contextmanager
def _building(cfg: Config) -> Iterator[None]:
    """Build inside: seeded, in the scope of the config, without mmengine's lines about every parameter."""
    logger = MMLogger.get_current_instance()
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        with seeded(cfg), _scope(cfg):
            yield
    finally:
        logger.setLevel(before)
