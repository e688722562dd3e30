"""What every runner gets that trains with a wrapper of this package, by mmengine's own hook methods."""

from __future__ import annotations

import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import CheckpointHook, Hook, LoggerHook
from mmengine.model import BaseDataPreprocessor, BaseModel, is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..casting import roots
from ..checkpoint import file
from ..errors import AmpCheckpointError, some
from ..policy.options import is_whole
from . import files, shard_files, sharding
from .attaching import amp_wrappers, averages_of, inner_model, wrappers_of
from .exact_resume import ExactResumeHook
from .log import follow_runners, log, warn


class AmpRunnerHook(Hook):
    """Checks what is resumed from, compiles the model's call, and brings numbers of the device to the log.

    It comes after hooks that log numbers, and before ``EMAHook`` and ``LoggerHook``.
    """

    priority = 45  # type: ignore[assignment]
    _has_read_back = False

    def before_train(self, runner: Any) -> None:
        """Let ``compile`` in the config compile the model's call, where mmengine compiles the whole ``train_step``.

        Best checkpoints of another run, from whose file this one goes on, are forgotten: mmengine would delete them.
        """
        options = runner.cfg.get('compile')
        if options not in (None, False) and vars(runner.model).pop('train_step', None) is not None:
            compile_model(inner_model(runner.model), {} if options is True else dict(options))
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook.out_dir]
        places = [runner.work_dir, *(Path(hook.out_dir, Path(runner.work_dir).name) for hook in savers)]
        own = [Path(place).resolve() for place in places]
        info = runner.message_hub.runtime_info
        for name in [name for name in info if name.startswith('best_ckpt')]:
            if info[name] and Path(info[name]).resolve().parent not in own:
                del info[name]

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Bring waiting numbers to the log where ``LoggerHook`` reads it now. Syncs there."""
        intervals = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
        is_last = self.end_of_epoch(runner.train_dataloader, batch_idx)
        if is_last or any(self.every_n_inner_iters(batch_idx, interval) for interval in intervals):
            flush_logs(runner)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Check all that a resume would apply, before mmengine applies any of it; cut states into shards.

        Raises:
            AmpCheckpointError: Not of this model, optimizer or schedule.
        """
        if isinstance(checkpoint.get('meta'), dict):
            # the text of a config of mmcv 1, which mmengine would execute
            checkpoint['meta'].pop('config', None)
        if runner._resume and wrappers_of(runner):
            check(runner, checkpoint)
        shard_files.shard_checkpoint(runner, checkpoint)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the numbers that waited, and take out the methods that schedules keep. Syncs.

        Content that could not be read back is warned of once.
        """
        flush_logs(runner)
        now, hub = runner.message_hub.state_dict(), checkpoint['message_hub']
        hub['log_scalars'], hub['resumed_keys'] = now['log_scalars'], {**hub['resumed_keys'], **now['resumed_keys']}
        saved = checkpoint.get('param_schedulers')
        for states in saved.values() if isinstance(saved, dict) else [saved or []]:
            states[:] = [{key: value for key, value in state.items() if not callable(value)} for state in states]
        if not self._has_read_back:
            self._has_read_back = True
            _read_back(checkpoint)


def flush_logs(runner: Any) -> None:
    """Bring the waiting numbers of all wrappers to the log. Syncs."""
    for wrapper in wrappers_of(runner).values():
        wrapper.device_log.flush()


def _read_back(checkpoint: dict[str, Any]) -> None:
    """Read what is no weight, so that a warning comes at the first save and no error when the run is resumed."""
    stream = io.BytesIO()
    torch.save({key: checkpoint.get(key) for key in ('meta', 'message_hub', 'param_schedulers')}, stream)
    stream.seek(0)
    try:
        file.read(stream, 'this checkpoint')
    except AmpCheckpointError as error:
        warn(f'nothing can be resumed from what is saved: {error}')


# -- compiling --------------------------------------------------------------------------------------------------------


def compile_model(model: nn.Module, options: dict[str, Any]) -> None:
    """Let ``torch.compile`` compile the forward call of a model, with the loss that it returns, inside of DDP.

    The step of the optimizer, the hooks of the model and the preprocessing of data stay outside. So training and validation
    share what is compiled, and DDP's overlap with the backward pass stays.

    Args:
        model: Of mmengine, without a wrapper.
        options: Keywords of :func:`torch.compile`.
    """
    inner = roots.unwrap(model)
    targets = [inner]
    if getattr(type(inner), 'train_step', None) is not BaseModel.train_step:
        # it may call its parts directly, as in a GAN
        bare = (BaseDataPreprocessor, nn.ModuleList, nn.ModuleDict)
        parts = [roots.unwrap(child) for child in inner.children() if any(True for _ in child.parameters())]
        targets += [part for part in parts if not isinstance(part, bare)]
    for module in targets:
        module.compile(**options)
    names = ', '.join(type(module).__name__ for module in targets)
    log(f'torch.compile compiles the forward calls of {names}, losses included. The first iterations are slow')


# -- resuming ---------------------------------------------------------------------------------------------------------


class _WithoutCopies(TorchFunctionMode):
    """Inside, ``copy_`` copies nothing: loading a state dict checks names and shapes, and applies nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


def check(runner: Any, checkpoint: Any) -> None:
    """Check that a file is of the model, averages, optimizers and schedules of a runner, applying no tensor of it.

    Args:
        runner: About to resume.
        checkpoint: As it was read.

    Raises:
        AmpCheckpointError: Names what does not fit.
    """
    path, files.local_loader.path = files.local_loader.path, None
    try:
        lost = [key for key in ('meta', 'state_dict', 'message_hub') if not isinstance(checkpoint.get(key), Mapping)]
        if not lost:
            lost = [f'meta[{key!r}]' for key in ('epoch', 'iter') if not is_whole(checkpoint['meta'].get(key))]
        if lost:
            raise AmpCheckpointError(f'it has no {lost[0]}: load its weights only (resume=False).')
        # mmengine takes this prefix off, too
        weights = {name.removeprefix('module.'): value for name, value in checkpoint['state_dict'].items()}
        _check_names(inner_model(runner.model), weights, getattr(checkpoint['state_dict'], '_metadata', None))
        for average in averages_of(runner) if 'ema_state_dict' in checkpoint else ():
            _check_names(average, checkpoint['ema_state_dict'])
        if 'optimizer' in checkpoint:
            _check_optimizers(runner.optim_wrapper, checkpoint['optimizer'])
        else:
            warn('the checkpoint has no state of the optimizer, which begins anew, with a new loss scale')
        if 'param_schedulers' in checkpoint and runner.param_schedulers is not None:
            _check_schedules(checkpoint['param_schedulers'], runner.param_schedulers)
    except Exception as error:  # load hooks of models may raise anything
        text = ' '.join(str(error).split())
        raise AmpCheckpointError(f'{path or runner._load_from} cannot be resumed from: {text}') from error


def _check_names(module: nn.Module, saved: Mapping[str, Any], versions: Any = None) -> None:
    """Load a state dict in a dry run: names and shapes have to be those that the module saves itself."""
    # hooks of modules may change what they are given
    copied = ((name, v.to('cpu', copy=True) if isinstance(v, Tensor) else v) for name, v in saved.items())
    state: Any = OrderedDict(copied)
    state._metadata = getattr(saved, '_metadata', versions)
    with _WithoutCopies():
        found = module.load_state_dict(state, strict=False)
    own = module.state_dict()
    if strange := [*(name for name in found.missing_keys if name in own), *found.unexpected_keys]:
        raise AmpCheckpointError(f'it lacks these weights of the model, or has them too many: {some(strange)}.')


def _check_optimizers(wrapper: Any, state: Any) -> None:
    several = isinstance(wrapper, OptimWrapperDict)
    if several and set(state) != set(wrapper.keys()):
        raise AmpCheckpointError(f'optimizer has {", ".join(map(str, state))}, not {", ".join(wrapper.keys())}.')
    for name, member in amp_wrappers(wrapper).items():
        member.check_state_dict(state[name] if several else state)


def _check_schedules(saved: Any, built: Any) -> None:
    """mmengine zips the two, and a schedule takes over whatever a file has."""
    states, schedulers = (list(itertools.chain(*x.values())) if isinstance(x, dict) else x for x in (saved, built))
    if len(states) != len(schedulers):
        raise AmpCheckpointError(f'there are {len(states)} param_schedulers, not {len(schedulers)}: load weights only.')
    for index, (state, scheduler) in enumerate(zip(states, schedulers)):
        known = scheduler.state_dict()
        lost = [key for key in ('last_step', '_global_step', 'base_values') if key in known and key not in state]
        if lost or state.get('param_name') != scheduler.param_name:
            kind = type(scheduler).__name__
            raise AmpCheckpointError(f'param_schedulers[{index}] is of no {kind}: it lacks {lost or "its name"}.')


def _name_plainly(model: nn.Module) -> None:
    """Let wrappers inside of a model (one DDP for each child, say) not show in the names of its state dict.

    mmengine takes them off while it loads, and looks for plain names.
    """
    for name, module in model.named_modules():
        if name and is_model_wrapper(module) and not hasattr(module, '_amp_wrapper_plain'):
            module._amp_wrapper_plain = True
            module._register_state_dict_hook(_take_off_prefix)
            module._register_load_state_dict_pre_hook(_put_on_prefix)


def _take_off_prefix(module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
    for names in (state, state._metadata):
        for key in [key for key in names if key == f'{prefix}module' or key.startswith(f'{prefix}module.')]:
            names[(prefix + key[len(prefix) + len('module') :].removeprefix('.')).rstrip('.')] = names.pop(key)


def _put_on_prefix(state: Any, prefix: str, *args: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f'{prefix}module.{key[len(prefix) :]}'] = state.pop(key)


def load_or_resume(original: Callable[..., None], runner: Any) -> None:
    """Prepare the model, and choose the newest whole checkpoint where none is named."""
    if not wrappers_of(runner):
        original(runner)
        return
    follow_runners()
    if not any(isinstance(hook, AmpRunnerHook) for hook in runner.hooks):
        runner.register_hook(AmpRunnerHook())
    for model in map(inner_model, (runner.model, *averages_of(runner))):
        _name_plainly(model)
    sharding.shard_model_of(runner)
    if runner._resume and runner._load_from is None and not runner._has_loaded and '://' not in runner.work_dir:
        runner._load_from = files.newest(runner.work_dir)
    files.local_loader.model = inner_model(runner.model)
    try:
        original(runner)
    finally:
        files.local_loader.model = None
    if runner._resume:
        _follow_length(runner)


def _follow_length(runner: Any) -> None:
    """Count iterations in epochs of the present length: mmengine would count beyond the end of the training."""
    loop = runner.train_loop
    if not isinstance(loop, EpochBasedTrainLoop):
        return
    first, length = loop.epoch * len(loop.dataloader), len(loop.dataloader)
    if not first <= loop.iter <= first + length:
        warn(f'iteration {loop.iter} of the file becomes {first}, where epoch {loop.epoch + 1} begins: check schedules')
        loop._iter = first
    elif loop.iter > first and not any(isinstance(hook, ExactResumeHook) for hook in runner.hooks):
        warn('the file is of the middle of an epoch, which mmengine begins again: add amp_wrapper.ExactResumeHook')
