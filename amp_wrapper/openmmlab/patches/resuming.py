"""Resuming through mmengine: from the newest complete file, validated as a whole before any of it is applied.

Nothing in a file is executed, whatever the environment allows, and wrappers inside the model (one DDP for each child) make no
difference to names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from pathlib import Path
from typing import Any

from mmengine.dist import broadcast_object_list, get_rank
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop

from ...checkpoint import file as checkpoint_file
from ...checkpoint import newest as newest_checkpoint
from ...checkpoint import schema, sharded, validate, validate_optimizer
from ...checkpoint.names import reader, renamed
from ...errors import AmpCheckpointError
from .. import shard_files
from ..monitor_hook import STATE as MONITOR
from ..resume import data_order
from ..wrappers import inner_model, wrappers_of
from .saving import WAITING, is_local

# the runner that is loading, where it trains with a wrapper of this package
_ours: ContextVar[Any] = ContextVar('_ours', default=None)


@contextmanager
def _loading_for(runner: Any) -> Iterator[None]:
    token = _ours.set(runner if wrappers_of(runner) else _ours.get())
    try:
        yield
    finally:
        _ours.reset(token)


@contextmanager
def _naming(filename: str) -> Iterator[None]:
    """Name the file in errors raised inside."""
    try:
        yield
    except AmpCheckpointError as error:
        if str(filename) in str(error):
            raise
        raise AmpCheckpointError(f'{filename} cannot be resumed from: {error}') from error


def choose_newest(work_dir: str, log: Any, more: list[str]) -> str | None:
    """The newest complete checkpoint of a work folder, the same on every rank.

    Args:
        work_dir: A local folder.
        log: Takes one line per file that was passed over.
        more: Further folders that checkpoints of this run are saved to.

    Returns:
        Its path; None where no checkpoint was written yet.

    Raises:
        AmpCheckpointError: There are checkpoints, and none is complete.
    """
    found: list[Any] = [None]
    if get_rank() == 0:
        newest = newest_checkpoint.find_newest(work_dir, more)
        for reason in newest.passed_over:
            log(f'amp: passed over: {reason}')
        if newest.path is not None:
            found[0] = str(newest.path)
        elif newest.passed_over:
            found[0] = AmpCheckpointError(
                f'no checkpoint in {work_dir} is complete ({"; ".join(newest.passed_over)}). To start anew, remove them or '
                f'choose another work_dir.'
            )
    broadcast_object_list(found)
    if isinstance(found[0], AmpCheckpointError):
        raise found[0]
    chosen: str | None = found[0]
    return chosen


def _points_away(work_dir: str) -> bool:
    """Whether ``last_checkpoint`` names a file on some server: mmengine knows how to get it."""
    pointer = Path(work_dir) / 'last_checkpoint'
    text = pointer.read_text(errors='replace').strip() if pointer.is_file() else ''
    return '://' in text and not text.startswith('file://')


def _out_dirs(runner: Any) -> list[str]:
    """Where the ``CheckpointHook``s will save, which they find out for themselves only when the training starts."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook.out_dir]
    base = Path(runner.work_dir.rstrip('/')).name
    return [str(Path(hook.out_dir) / base) for hook in hooks if is_local(hook.out_dir, hook.backend_args)]


def _is_local_file(filename: Any) -> bool:
    return isinstance(filename, str) and '://' not in filename and is_local(filename)


def validate_file(runner: Any, filename: str, resume_optimizer: bool, resume_param_scheduler: bool) -> Any:
    """Check every part of a local checkpoint that :meth:`Runner.resume` would apply, and apply nothing.

    Args:
        runner: Whose model, wrappers, schedulers and hooks are built.
        filename: A local file, or a folder of shards.
        resume_optimizer: As of ``resume``.
        resume_param_scheduler: As of ``resume``.

    Returns:
        The content of the file; tensors are read when they are used, and shards not at all.

    Raises:
        AmpCheckpointError: Names file, key and expectation.
    """
    shard_files.verify(filename)
    if sharded.is_folder(filename):
        file = sharded.load(filename, check=False, only_shapes=True)
    else:
        file = checkpoint_file.load(filename, check=False, mmap=True)
    _warn_of_mid_epoch(runner, file)
    with _naming(filename):
        _check_parts(runner, file, resume_optimizer, resume_param_scheduler)
    return file


def _warn_of_mid_epoch(runner: Any, file: Any) -> None:
    part = file.get('exact_resume') if isinstance(file, Mapping) else None
    batches = part.get('batches') if isinstance(part, Mapping) else None
    # without the hook, nobody has checked it
    inside = isinstance(batches, int) and batches > 0
    if inside and not any(hasattr(hook, 'collect_states') for hook in runner.hooks):
        runner.logger.warning(
            "amp: this checkpoint was saved in the middle of an epoch, which mmengine begins again: add dict(type='amp_wrapper."
            "ExactResumeHook') to custom_hooks"
        )


def _check_parts(runner: Any, file: Any, resume_optimizer: bool, resume_param_scheduler: bool) -> None:
    validate.check_parts(file, resume_optimizer)
    model = inner_model(runner.model)
    state = file['state_dict']
    validate.check_model(state, model)
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and 'ema_state_dict' in file:
            validate.check_average(file['ema_state_dict'], model, getattr(hook, 'ema_model', None))
            # the hook swaps the two by name
            for key in file['ema_state_dict']:
                if key.startswith('module.') and key[len('module.') :] not in state:
                    raise AmpCheckpointError(
                        f'state_dict lacks {key[len("module.") :]!r}, which ema_state_dict has: it is damaged.'
                    )
    _MESSAGE_HUB.check(file['message_hub'], 'message_hub')
    if resume_optimizer:
        _check_optimizer(runner, file['optimizer'])
    schedulers = getattr(runner, 'param_schedulers', None)
    if resume_param_scheduler and 'param_schedulers' in file and isinstance(schedulers, (list, dict)):
        built = schedulers if isinstance(schedulers, dict) else {'': schedulers}
        if all(hasattr(scheduler, 'state_dict') for items in built.values() for scheduler in items):
            validate_optimizer.check_schedulers(file['param_schedulers'], schedulers)
    for hook in runner.hooks:
        check = getattr(hook, 'check_states', None)
        if check is not None:
            check(file)


def _are_whole(buffer: Any) -> bool:
    values, counts = getattr(buffer, '_log_history', None), getattr(buffer, '_count_history', None)
    return values is None or (counts is not None and getattr(values, 'shape', 0) == getattr(counts, 'shape', 1))


def _are_counters(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 5 and all(isinstance(each, int) for each in value)


def _list_of(name: str, kind: type) -> schema.Is:
    return schema.named(f'a list of {name}', schema.ListOf(schema.kind(name, kind)))


_PATH = schema.Maybe(schema.kind('a path', str))
_MESSAGE_HUB = schema.Record(
    {
        'log_scalars': schema.MapOf(schema.Is('', _are_whole, '{path} is damaged: values and counts do not match.')),
        'runtime_info': schema.Record(
            optional={
                'best_score': schema.Is('a number', lambda v: hasattr(v, '__float__') and not isinstance(v, str)),
                'best_ckpt': _PATH,
                'last_ckpt': _PATH,
                'keep_ckpt_ids': _list_of('whole numbers', Integral),
                WAITING: _list_of('names', str),
                newest_checkpoint.SAVES: _list_of('names', str),
                MONITOR: schema.MapOf(schema.Is('five whole numbers', _are_counters)),
            }
        ),
        'resumed_keys': schema.MapOf(schema.SWITCH),
    }
)


def _check_optimizer(runner: Any, state: Any) -> None:
    wrappers = wrappers_of(runner)
    if not isinstance(runner.optim_wrapper, OptimWrapperDict):
        for wrapper in wrappers.values():
            wrapper.check_state_dict(state)
        return
    names = list(runner.optim_wrapper.keys())
    if not isinstance(state, Mapping) or set(state) != set(names):
        found = ', '.join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise AmpCheckpointError(
            f'optimizer must hold one state for each of {", ".join(names)}, but holds {found}: resume with the wrappers it '
            f'was saved with.'
        )
    for name, wrapper in wrappers.items():
        try:
            wrapper.check_state_dict(state[name])
        except AmpCheckpointError as error:
            raise AmpCheckpointError(f'optimizer[{name!r}]: {error}') from error


def choose_file(runner: Any) -> bool:
    """Choose what a runner with ``resume=True`` and no path loads.

    Args:
        runner: Whose ``load_or_resume`` is called.

    Returns:
        Whether mmengine may go on.

    Raises:
        AmpCheckpointError: There are checkpoints, and none is complete.
    """
    auto = runner._resume is True and runner._load_from is None and not runner._has_loaded
    if auto and wrappers_of(runner) and is_local(runner.work_dir) and not _points_away(runner.work_dir):
        path = choose_newest(runner.work_dir, runner.logger.warning, _out_dirs(runner))
        if path is None:
            runner.logger.info(f'amp: nothing to resume from in {runner.work_dir} yet: the training starts anew')
            return False
        runner.logger.info(f'amp: resuming from {path}, the newest complete checkpoint')
        runner._load_from = path
    return True


def resume(
    original: Callable[..., None],
    runner: Any,
    filename: str,
    resume_optimizer: bool = True,
    resume_param_scheduler: bool = True,
    **kwargs: Any,
) -> None:
    """Replaces ``resume`` of runners: the whole file is validated before any of it is applied."""
    length = None
    if wrappers_of(runner) and _is_local_file(filename):
        length = _epoch_length(validate_file(runner, filename, resume_optimizer, resume_param_scheduler))
    with _loading_for(runner), _naming(filename):
        original(runner, filename, resume_optimizer, resume_param_scheduler, **kwargs)
    if length is not None:
        _follow_epochs(runner, *length)


def _epoch_length(file: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many iterations an epoch had when a file was written, and how many of the present one were done (-1 where that is
    guessed); None where it is unknown."""
    part, meta = file.get('exact_resume'), file['meta']
    if part:
        return part['length'], part['batches']
    done = meta.get('epoch', 0)
    return (meta['iter'] // done, -1) if done > 0 and meta['iter'] % done == 0 else None


def _follow_epochs(runner: Any, length: int, batches: int) -> None:
    """Other numbers of processes have epochs of other lengths: mmengine would count beyond the end of the training, and
    divide losses by a number of accumulated iterations of 0."""
    loop = runner.train_loop
    now = data_order.batches_of(loop)
    if not isinstance(loop, EpochBasedTrainLoop) or now < 1 or length < 1 or now == length:
        return
    if batches < 0:
        # guessed: dividing the iterations by the epochs is wrong for a file of an iteration inside an epoch
        if loop._epoch * now <= loop._iter <= (loop._epoch + 1) * now:
            return
        batches = 0
    before, loop._iter = loop._iter, loop._epoch * now + min(batches, now)
    runner.logger.info(
        f'amp: an epoch had {length} iterations and has {now} now: the training goes on at iteration {loop._iter}, where '
        f'the checkpoint has {before}'
    )
    schedulers = getattr(runner, 'param_schedulers', None) or []
    built = itertools.chain(*schedulers.values()) if isinstance(schedulers, dict) else schedulers
    names = [type(scheduler).__name__ for scheduler in built if not getattr(scheduler, 'by_epoch', True)]
    if names:
        runner.logger.warning(
            f'amp: {", ".join(dict.fromkeys(names))} count iterations, and go on as they were planned for epochs of {length}: '
            f'look at the learning rate, or load the weights only (resume=False) and plan anew'
        )


def _revise_keys(model: Any) -> list[tuple[str, str]]:
    """mmengine's own '^module.' has a dot that stands for any letter: it takes "module_" from "module_list.0.weight"."""
    return [] if hasattr(inner_model(model), 'module') else [(r'^module\.', '')]


def load_checkpoint(original: Callable[..., Any], runner: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint`` of runners: compares checksums, and cuts only a real ``module.`` off names."""
    shard_files.settle(runner)
    if not wrappers_of(runner):
        return original(runner, filename, *args, **kwargs)
    if _is_local_file(filename) and _ours.get() is None:
        # a resume has done this
        shard_files.verify(filename)
    if len(args) < 3:
        kwargs.setdefault('revise_keys', _revise_keys(runner.model))
    with _loading_for(runner):
        return original(runner, filename, *args, **kwargs)


def load_through_strategy(original: Callable[..., Any], strategy: Any, filename: str, **kwargs: Any) -> Any:
    """Replaces ``SingleDeviceStrategy.load_checkpoint``: cuts only a real ``module.`` off names."""
    if _ours.get() is not None:
        kwargs.setdefault('revise_keys', _revise_keys(strategy.model))
    return original(strategy, filename, **kwargs)


def load_local_file(original: Callable[..., Any], filename: str, map_location: Any) -> Any:
    """Replaces mmengine's loader for local files: runs no code from a file, raises typed errors, reads folders of shards."""
    if sharded.is_folder(filename):
        return shard_files.load(_ours.get(), filename, map_location)
    if _ours.get() is not None:
        # typed errors, and no code is run even where TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD would let it
        return checkpoint_file.load(Path(filename).expanduser(), map_location, check=False)
    return original(filename, map_location)


def name_plainly(runner: Any, checkpoint: dict[str, Any]) -> None:
    """Give the weights of a checkpoint plain names before it is applied: mmengine takes the wrappers inside a model off
    while it loads, and looks for those.

    Args:
        runner: Trains with a wrapper of this package or not.
        checkpoint: Changed in place.
    """
    state = checkpoint.get('state_dict') if wrappers_of(runner) else None
    if isinstance(state, dict) and any(isinstance(key, str) and 'module' in key.split('.') for key in state):
        read = reader(inner_model(runner.model), [key for key in state if isinstance(key, str)])
        checkpoint['state_dict'] = renamed(state, read)
