"""What an mmengine config trains, built without a runner: model, optimizer, batches and loss, for reports and comparisons."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mmengine.runner.activation_checkpointing as mm_checkpointing
import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from mmengine.runner.checkpoint import _load_checkpoint, _load_checkpoint_to_model
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import convert, random_state, sharded
from ..checkpoint import file as checkpoint_file
from ..engine import Engine
from ..errors import AmpConfigError, AmpError, AmpUsageError, nearest
from . import attaching, config_checks, generated_data
from .config_options import read_config
from .wrapper_settings import (
    SCRIPT,
    WrapperSettings,
    can_be_built,
    check_words,
    optimizer_words,
    settings_of,
    settings_of_words,
)


@dataclasses.dataclass(frozen=True)
class FromConfig:
    """What :func:`from_config` built.

    Attributes:
        config: With the command line's entries.
        model: FP32, initialised or loaded, in training mode, on its device.
        settings: Of the optimizer wrapper.
        input_shape: Of generated inputs: (C, H, W) or (N, C, H, W); None to read the data set.
    """

    config: Config
    model: nn.Module
    settings: WrapperSettings
    input_shape: tuple[int, ...] | None = None

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the config for a model, with its ``paramwise_cfg``, made by its constructor.

        Args:
            model: :attr:`model` or a copy of it.

        Raises:
            AmpConfigError: The config builds several optimizers, or none: the message of its mistake.
        """
        words = {key: self.config.optim_wrapper.get(key) for key in ('optimizer', 'paramwise_cfg', 'constructor')}
        words = {key: value for key, value in words.items() if value is not None}
        return _build_wrapper(self.config, model, dict(type='OptimWrapper', **words)).optimizer

    def attach(self, engine: Engine, model: nn.Module) -> nn.Module:
        """Attach a copy of the model as training does: with the config's ``activation_checkpointing``.

        Args:
            engine: Not attached yet; with the optimizer of the copy.
            model: A copy of :attr:`model`.
        """
        for key, turn_on in (
            ('activation_checkpointing', mm_checkpointing.turn_on_activation_checkpointing),
            ('efficient_conv_bn_eval', turn_on_efficient_conv_bn_eval),
        ):
            value = self.config.get(key)
            if value is not None:
                with _config_errors(f'{key}={value!r} does not fit the model'):
                    turn_on(model, value)
        return attaching.attach(engine, model)

    @contextmanager
    def model_errors(self, level: Callable[[], str]) -> Iterator[None]:
        """Inside, errors of the model are errors of one line, which say at which level it was run.

        Args:
            level: That which is being tried.

        Raises:
            AmpUsageError: In place of any error that is not of this package.
        """
        try:
            yield
        except (AmpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # models are programs of others
            what = f'a training step of the model fails at {level()} ({_in_a_line(error)})'
            shape = '' if self.input_shape is None else f' with --input-shape {" ".join(map(str, self.input_shape))}'
            raise AmpUsageError(f'{what}{shape}. AMP_WRAPPER_DEBUG=1 in the environment shows where.') from error

    def batches(self, count: int) -> list[Any]:
        """The first batches of the training data, collated; or generated ones, where there is an :attr:`input_shape`.

        Random states are as before. The data set begins anew where it is shorter.

        Args:
            count: At least 1.

        Raises:
            AmpUsageError: The data cannot be read, or none can be generated for this model; says which option to give.
        """
        with _scope(self.config), seeded(self.config), _quiet():
            if self.input_shape is not None:
                size = (self.config.get('train_dataloader') or {}).get('batch_size') or 2
                shape = self.input_shape if len(self.input_shape) == 4 else (int(size), *self.input_shape)
                return [generated_data.batch(self.model, shape) for _ in range(count)]
            return self._read(count)

    def _read(self, count: int) -> list[Any]:
        words = copy.deepcopy(self.config.get('train_dataloader'))
        if words is None:
            raise AmpUsageError(
                f'the config has no train_dataloader: give --input-shape, such as {_EXAMPLE}, to generate data.'
            )
        # a few batches are not worth processes
        words.update(num_workers=0, persistent_workers=False, pin_memory=False)
        for key in ('prefetch_factor', 'multiprocessing_context', 'timeout', 'worker_init_fn'):
            words.pop(key, None)
        found: list[Any] = []
        try:
            loader = Runner.build_dataloader(words)
            while len(found) < count:
                before = len(found)
                for batch in loader:
                    found.append(batch)
                    if len(found) == count:
                        break
                if len(found) == before:
                    raise AmpUsageError('the training data set is empty.')
        except AmpUsageError:
            raise
        except Exception as error:
            # data sets are programs of others
            raise AmpUsageError(
                f'the training data cannot be read ({_in_a_line(error)}): give --cfg-options data_root=PATH, or '
                f'--input-shape, such as {_EXAMPLE}, to generate data.'
            ) from error
        return found

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch as mmengine's ``train_step`` computes it, for gradients.

        Args:
            model: :attr:`model` or a copy of it, attached or not. What surrounds a forward pass of an engine is the caller's.
            batch: Of :meth:`batches`; not changed.

        Returns:
            A scalar, with its graph.
        """
        assert isinstance(model, BaseModel)
        with _scope(self.config):
            # preprocessors of some projects write into the samples
            data = model.data_preprocessor(copy.deepcopy(batch), True)
            losses = model._run_forward(data, mode='loss')
            with ExitStack() as stack:
                # mmengine adds losses up outside of autocast
                for device in {'cpu', next(model.parameters()).device.type}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return model.parse_losses(losses)[0]


_EXAMPLE = '--input-shape 3 224 224'


def _in_a_line(error: BaseException) -> str:
    """The class of an error and what it says."""
    return f'{type(error).__name__}: {" ".join(str(error).split())}'


@contextmanager
def _config_errors(what: str) -> Iterator[None]:
    """Inside, mistakes of a config are told in a line, after ``what``.

    Raises:
        AmpConfigError: In place of any error that is not of this package.
    """
    try:
        yield
    except AmpError:
        raise
    except Exception as error:
        # what is built may raise anything
        raise AmpConfigError([f'{what}: {_in_a_line(error)}']) from error


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise AmpConfigError(
            [f"device={device!r} is none that torch knows, such as 'cpu', 'cuda' or 'cuda:1'."]
        ) from error
    if chosen.type == 'cuda' and (chosen.index or 0) >= torch.cuda.device_count():
        raise AmpConfigError([f'device={device!r}: torch sees {torch.cuda.device_count()} GPUs here.'])
    return chosen


def from_config(
    config: str | Path | Config,
    cfg_options: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    device: str | torch.device | None = None,
    input_shape: Sequence[int] | None = None,
) -> FromConfig:
    """Build what a config trains. No runner, no folder and no log file is made; random states are as before.

    Args:
        config: A path, or a config that was read.
        cfg_options: Entries to override.
        checkpoint: A local file of any kind that :mod:`amp_wrapper.checkpoint.convert` knows, a folder of shards, or a URL; the
            config's ``load_from`` by default. Without one, the weights are those that training begins with.
        device: The first GPU by default, or the CPU where there is none.
        input_shape: (C, H, W) or (N, C, H, W): batches are generated in this shape.

    Raises:
        AmpConfigError: The config cannot be read or built, or trains with several optimizers.
        AmpUsageError: The config or the checkpoint is not there; a shape that is none.
        AmpCheckpointError: A checkpoint that cannot be read.
    """
    shape = None if input_shape is None else tuple(input_shape)
    if shape is not None and (len(shape) not in (3, 4) or any(size < 1 for size in shape)):
        raise AmpUsageError(f'--input-shape {" ".join(map(str, shape))}: must be C H W or N C H W, such as {_EXAMPLE}.')
    cfg = config if isinstance(config, Config) else read_config(config, cfg_options)
    with _scope(cfg):
        check_words(cfg.get('optim_wrapper'))
    # mmengine takes entries out of what it builds from
    cfg = copy.deepcopy(cfg)
    place = checkpoint or cfg.get('load_from')
    if checkpoint is not None:
        _check_there(str(checkpoint))
    with _scope(cfg), seeded(cfg), _quiet():
        model = _build_model(cfg, is_loaded=place is not None)
        if place is not None:
            _load(model, str(place))
    chosen = _device(device)
    model = model.to(chosen).train()
    built = FromConfig(cfg, model, _settings(cfg, model), shape)
    # also where a wrapper cannot be built here: mistakes are found before anything runs
    built.make_optimizer(model)
    return built


def _settings(cfg: Config, model: nn.Module) -> WrapperSettings:
    """What the wrapper says that a training would have. It is built, and thrown away."""
    with _scope(cfg):
        if not can_be_built(cfg.optim_wrapper):
            return settings_of_words(cfg.optim_wrapper)
    return settings_of(_build_wrapper(cfg, model, dict(cfg.optim_wrapper)))


def _build_wrapper(cfg: Config, model: nn.Module, words: dict[str, Any]) -> OptimWrapper:
    """The wrapper with its optimizer, made by the constructor that the words name.

    Raises:
        AmpConfigError: The message of a mistake; several optimizers.
    """
    words = copy.deepcopy(words)
    with _scope(cfg), _quiet(), _config_errors('optim_wrapper cannot be built'):
        if words.get('constructor') is None:
            words['optimizer'] = optimizer_words(words['optimizer'])
        built = build_optim_wrapper(model, words)
    if isinstance(built, OptimWrapperDict):
        raise AmpConfigError([f'optim_wrapper builds {len(built)} optimizers: {SCRIPT}.'])
    if not isinstance(built, OptimWrapper):
        raise AmpConfigError([f'optim_wrapper builds a {type(built).__name__}, which is no OptimWrapper: {SCRIPT}.'])
    return built


def _build_model(cfg: Config, is_loaded: bool) -> nn.Module:
    words = copy.deepcopy(cfg.get('model'))
    if words is None:
        raise AmpConfigError(['the config has no model.'])
    if cfg.get('data_preprocessor') is not None:
        words.setdefault('data_preprocessor', cfg.data_preprocessor)
    with _config_errors('the model cannot be built'):
        model = MODELS.build(words)
    if not isinstance(model, BaseModel):
        raise AmpConfigError([f'model.type={type(model).__name__} is no mmengine BaseModel: {SCRIPT}.'])
    if type(model).train_step is not BaseModel.train_step:
        raise AmpConfigError([f'{type(model).__name__} has a train_step of its own, which may do anything: {SCRIPT}.'])
    try:
        # of what the checkpoint does not have
        model.init_weights()
    except (OSError, RuntimeError) as error:
        if not is_loaded:
            raise AmpConfigError(
                [
                    f'the weights cannot be initialised ({_in_a_line(error)}): give --checkpoint, or turn '
                    f'pretrained parts off (--cfg-options model.backbone.init_cfg=None).'
                ]
            ) from error
    return model


def _check_there(place: str) -> None:
    path = Path(place)
    if not config_checks.is_url(place) and not path.is_file() and not sharded.is_folder(path):
        beside = [other.name for other in path.parent.glob('*.pth')] if path.parent.is_dir() else []
        raise AmpUsageError(f'the checkpoint {place!r} does not exist{nearest(path.name, beside)}.')


def _load(model: nn.Module, place: str) -> None:
    if config_checks.is_url(place):
        _load_checkpoint_to_model(model, _load_checkpoint(place, map_location='cpu'))
        return
    _check_there(place)
    content = sharded.load(place) if sharded.is_folder(place) else checkpoint_file.load(place)
    weights, _ = convert.to_weights(content, torch.float32)
    _load_checkpoint_to_model(model, weights)


@contextmanager
def _scope(cfg: Config) -> Iterator[None]:
    """Names are looked for in the project of the config, as in a run."""
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
        yield


@contextmanager
def seeded(cfg: Config) -> Iterator[None]:
    """Inside, random numbers begin with the seed of the config; outside, they are as before."""
    before = random_state.capture()
    seed = (cfg.get('randomness') or {}).get('seed') or 0
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        random_state.restore(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """mmengine tells of every parameter that it initialises."""
    logger = MMLogger.get_current_instance()
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)
