"""Saving through mmengine, so that a crash at any moment loses nothing. Only where a wrapper of ours trains.

* ``save_checkpoint``: files are written whole or not at all (:mod:`amp_wrapper.checkpoint.file`); mmengine overwrites.
* ``CheckpointHook``: deletes the old before it writes the new; here the old goes when the new one stands. What was due to
  be deleted is written into the new file, so that a run that died in between is tidied up when it is resumed.
* ``CheckpointHook.before_train``: forgets which file was the last, so that ``save_best`` did not update it after a resume.

Each patch is the identity where no wrapper of ours is attached, and where files do not lie on a local disk.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import mmengine.runner
import mmengine.runner.checkpoint
import mmengine.runner.runner
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.runner import FlexibleRunner, Runner

from ...checkpoint import file as checkpoint_file
from ...checkpoint import names as model_names
from ...engine.buffers import snapshots as buffer_snapshots
from ...errors import AmpCheckpointError
from ...policy.policy import Policy

#: The checkpoint of a run that was told to stop; the next regular one takes its place.
PREEMPTED = 'preempted.pth'
#: Where a checkpoint keeps the paths that were due to be deleted when it was written.
WAITING = 'amp_waiting_removals'

# the runner whose files are being written, where they are ours
_saving: ContextVar[Any] = ContextVar('_saving', default=None)


def wrappers_of(runner: Any) -> dict[str, Any]:
    """The wrappers of ours that a runner trains with, by their names in an ``OptimWrapperDict`` ('' for a single one)."""
    wrapper = getattr(runner, 'optim_wrapper', None)
    members = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    return {name: member for name, member in members.items() if isinstance(getattr(member, 'policy', None), Policy)}


def is_local(path: str, backend_args: Any = None) -> bool:
    """Whether mmengine would write ``path`` to a local disk."""
    return isinstance(get_file_backend(path, backend_args=backend_args), LocalBackend)


@contextmanager
def _saved_by(runner: Any) -> Iterator[None]:
    # mmengine collects state dicts without the hooks that torch calls before it does
    buffer_snapshots.settle()
    token = _saving.set(runner if wrappers_of(runner) else _saving.get())
    try:
        yield
    finally:
        _saving.reset(token)


class _LaterRemovals:
    """A file backend that writes and reads as its original, and only remembers what it was told to remove."""

    def __init__(self, backend: Any, runner: Any) -> None:
        self._backend = backend
        self._runner = runner
        self.waiting: list[str] = []

    def remove(self, path: str) -> None:
        self.waiting.append(str(path))
        # the file about to be written tells a resumed run what its predecessor had no time for
        self._runner.message_hub.update_info(WAITING, list(self.waiting))

    rmtree = remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@contextmanager
def _removals_after(hook: Any, runner: Any) -> Iterator[None]:
    """Inside, what the hook deletes is only remembered; it goes when everything was written."""
    backend = hook.file_backend
    if isinstance(backend, _LaterRemovals) or not isinstance(backend, LocalBackend):
        yield
        return
    later = hook.file_backend = _LaterRemovals(backend, runner)
    try:
        yield
    finally:
        hook.file_backend = backend
    kept = {Path(path).resolve() for path in _kept(hook)}
    folder = Path(hook.out_dir).resolve()
    for path in later.waiting:
        # a run that was resumed from the file of another leaves the other's files alone
        if Path(path).resolve() not in kept and Path(path).resolve().parent == folder:
            backend.remove(path)
    runner.message_hub.update_info(WAITING, [])


def _kept(hook: Any) -> list[str]:
    """The files the hook counts as present: one of them may have the name of one that was due to go."""
    paths = [hook.last_ckpt, getattr(hook, 'best_ckpt_path', None), *getattr(hook, 'best_ckpt_path_dict', {}).values()]
    names = [hook.filename_tmpl.format(step) for step in getattr(hook, 'keep_ckpt_ids', ())]
    return [str(path) for path in paths if path] + [str(Path(hook.out_dir) / name) for name in names]


def _patch_files() -> None:
    original = mmengine.runner.checkpoint.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(
        checkpoint: dict[str, Any], filename: str, file_client_args: Any = None, backend_args: Any = None
    ) -> None:
        if _saving.get() is not None:
            checkpoint = _named_plainly(_plain(checkpoint), _saving.get().model)
        if _saving.get() is None or file_client_args is not None or not is_local(filename, backend_args):
            original(checkpoint, filename, file_client_args, backend_args)
            return
        path = filename[len('file://') :] if filename.startswith('file://') else filename
        checkpoint_file.save(checkpoint, path)
        if 'optimizer' in checkpoint:
            _warn_if_unreadable(path)

    for module in (mmengine.runner.checkpoint, mmengine.runner.runner, mmengine.runner):
        module.save_checkpoint = save_checkpoint

    for cls in (Runner, FlexibleRunner):
        cls.save_checkpoint = _inside(cls.save_checkpoint)


class _KeptMeta(dict):  # type: ignore[type-arg]
    """``FlexibleRunner`` overwrites the epoch and iteration that it is given; ``Runner`` does not."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **{key: value for key, value in kwargs.items() if key not in self})


def _plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Without what a file could not be read back with: methods that schedulers keep among their numbers."""
    checkpoint = dict(checkpoint)
    if isinstance(checkpoint.get('meta'), _KeptMeta):
        checkpoint['meta'] = dict(checkpoint['meta'])
    schedulers = checkpoint.get('param_schedulers')
    if isinstance(schedulers, dict):
        checkpoint['param_schedulers'] = {key: [_numbers(state) for state in part] for key, part in schedulers.items()}
    elif isinstance(schedulers, list):
        checkpoint['param_schedulers'] = [_numbers(state) for state in schedulers]
    return checkpoint


def _named_plainly(checkpoint: dict[str, Any], model: Any) -> dict[str, Any]:
    """Without the ``module.`` of wrappers inside the model, which mmengine does not find again."""
    model = model.module if is_model_wrapper(model) else model
    if not any(is_model_wrapper(module) for module in model.modules()):
        return checkpoint
    names = model_names.plain_names(model)
    for part, front in (('state_dict', ''), ('ema_state_dict', 'module.')):
        if part in checkpoint:
            plain = {front + key: front + name for key, name in names.items()}
            checkpoint[part] = {plain.get(key, key): value for key, value in checkpoint[part].items()}
    return checkpoint


def _numbers(state: Any) -> Any:
    return {key: value for key, value in state.items() if not callable(value)} if isinstance(state, dict) else state


_warned = False


def _warn_if_unreadable(path: str) -> None:
    """Found out now, not when the run is to be resumed."""
    global _warned
    if _warned:
        return
    try:
        checkpoint_file.load(path, check=False, mmap=True)
    except AmpCheckpointError as error:
        _warned = True
        print_log(f'amp: this checkpoint cannot be resumed from: {error}', logger='current', level=logging.WARNING)


def _inside(save: Any) -> Any:
    @functools.wraps(save)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wrappers_of(self) and isinstance(kwargs.get('meta'), dict):
            kwargs['meta'] = _KeptMeta(kwargs['meta'])
        with _saved_by(self):
            return save(self, *args, **kwargs)

    return save_checkpoint


def _patch_hook() -> None:
    before_train = CheckpointHook.before_train
    with_step = CheckpointHook._save_checkpoint_with_step
    best = CheckpointHook._save_best_checkpoint
    publish = CheckpointHook._publish_model

    @functools.wraps(before_train)
    def hook_before_train(self: Any, runner: Any) -> None:
        before_train(self, runner)
        if not wrappers_of(runner) or not is_local(self.out_dir, self.backend_args):
            return
        _remember_last(self, runner)
        if is_main_process():
            _tidy_up(self, runner)
            checkpoint_file.check_writable(self.out_dir)

    @functools.wraps(with_step)
    def save_with_step(self: Any, runner: Any, step: int, meta: dict[str, Any]) -> None:
        collect_states(runner)
        if not wrappers_of(runner):
            with_step(self, runner, step, meta)
            return
        mark_save(runner)
        with _removals_after(self, runner), _saved_by(runner):
            with_step(self, runner, step, meta)
        if self.save_optimizer and is_main_process() and isinstance(self.file_backend, LocalBackend):
            (Path(self.out_dir) / PREEMPTED).unlink(missing_ok=True)

    @functools.wraps(best)
    def save_best(self: Any, runner: Any, metrics: dict[str, Any]) -> None:
        if not wrappers_of(runner):
            best(self, runner, metrics)
            return
        with _removals_after(self, runner), _saved_by(runner):
            best(self, runner, metrics)

    @functools.wraps(publish)
    def publish_model(self: Any, runner: Any, ckpt_path: str) -> None:
        with _saved_by(runner):
            publish(self, runner, ckpt_path)

    CheckpointHook.before_train = hook_before_train
    CheckpointHook._save_checkpoint_with_step = save_with_step
    CheckpointHook._save_best_checkpoint = save_best
    CheckpointHook._publish_model = publish_model


def mark_save(runner: Any) -> None:
    """Note a new mark behind those of the files saved before, so that files can be put in order without a clock.

    Args:
        runner: About to save a checkpoint that can be resumed from.
    """
    before = runner.message_hub.runtime_info.get(checkpoint_file.SAVES) or []
    runner.message_hub.update_info(checkpoint_file.SAVES, [*before[-31:], uuid.uuid4().hex[:12]])


def collect_states(runner: Any) -> None:
    """Let every hook that has something to gather from all ranks do so: saving itself runs on rank 0 alone.

    Args:
        runner: On every rank, right before a checkpoint is saved.
    """
    for hook in runner.hooks:
        collect = getattr(hook, 'collect_states', None)
        if collect is not None:
            collect(runner)


def _remember_last(hook: Any, runner: Any) -> None:
    last = runner.message_hub.runtime_info.get('last_ckpt')
    if hook.last_ckpt is None and isinstance(last, str) and Path(last).is_file():
        hook.last_ckpt = last


def _tidy_up(hook: Any, runner: Any) -> None:
    names = checkpoint_file.remove_leftovers(hook.out_dir)
    kept = {Path(path).resolve() for path in _kept(hook)}
    folder = Path(hook.out_dir).resolve()
    source = Path(str(getattr(runner, '_load_from', None)))
    written = source.stat().st_mtime if source.is_file() else float('inf')
    for waiting in runner.message_hub.runtime_info.get(WAITING) or ():
        # whatever a file says, nothing but checkpoints of this very folder is removed
        path = Path(waiting).absolute()
        mine = path.parent.resolve() == folder and path.suffix == Path(hook.filename_tmpl).suffix
        # what is younger than the list belongs to another run in this folder
        if mine and path.is_file() and path.resolve() not in kept and path.stat().st_mtime <= written:
            path.unlink()
            names.append(path.name)
    if names:
        runner.logger.info(f'amp: removed what an interrupted run left behind: {", ".join(names)}')


def patch() -> None:
    """Put the patches in place; called once, by :func:`amp_wrapper.openmmlab.patches.members.apply`."""
    _patch_files()
    _patch_hook()
