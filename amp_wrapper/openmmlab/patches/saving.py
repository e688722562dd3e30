"""Saving through mmengine, so that a crash at any moment loses nothing. Only where a wrapper of this package trains.

Files are written whole or not at all, and old files go when the new ones stand. What was due to be deleted is written into
the new file, so that a run that died in between is tidied up when it is resumed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook
from mmengine.model import is_model_wrapper

from ...checkpoint import file as checkpoint_file
from ...checkpoint import folder, names, shard_writer
from ...checkpoint import newest as newest_checkpoint
from ...errors import AmpCheckpointError, AmpConfigError, CheckpointWriteError
from .. import shard_files
from ..log import warn
from ..wrappers import inner_model, wrappers_of

#: The checkpoint that a signal to stop has caused; the next regular one replaces it.
PREEMPTED = 'preempted.pth'
#: Where a checkpoint keeps the paths that were due to be deleted when it was written.
WAITING = 'amp_waiting_removals'

# what the caller wants in the meta of the file that is being written, where a wrapper of this package trains
_given_meta: ContextVar[Mapping[str, Any] | None] = ContextVar('_given_meta', default=None)


def is_local(path: str, backend_args: Any = None) -> bool:
    """Whether mmengine would write ``path`` to a local disk."""
    return isinstance(get_file_backend(path, backend_args=backend_args), LocalBackend)


# -- one file ----------------------------------------------------------------------------------------------------------


@contextmanager
def _saving(runner: Any, meta: Mapping[str, Any]) -> Iterator[None]:
    token = _given_meta.set(meta if wrappers_of(runner) else _given_meta.get())
    try:
        yield
    finally:
        _given_meta.reset(token)


def save_checkpoint(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``save_checkpoint`` of runners: the caller's ``meta`` is kept."""
    given = kwargs.get('meta')
    if isinstance(given, dict):
        # mmengine writes into it
        kwargs['meta'] = dict(given)
    with (
        _saving(runner, given if isinstance(given, dict) else {}),
        shard_files.saving(runner, kwargs.get('save_optimizer', True)),
    ):
        original(runner, *args, **kwargs)


def make_readable(runner: Any, checkpoint: dict[str, Any]) -> None:
    """Make the names and contents of a checkpoint such that they can be read back; called before it is saved.

    Args:
        runner: Trains with a wrapper of this package or not.
        checkpoint: Changed in place.
    """
    given = _given_meta.get()
    if given is None:
        return
    # FlexibleRunner has put its own epoch and iteration there
    checkpoint['meta'].update(given)
    schedulers = checkpoint.get('param_schedulers')
    if isinstance(schedulers, dict):
        checkpoint['param_schedulers'] = {key: [_numbers(state) for state in part] for key, part in schedulers.items()}
    elif isinstance(schedulers, list):
        checkpoint['param_schedulers'] = [_numbers(state) for state in schedulers]
    model = inner_model(runner.model)
    if not any(is_model_wrapper(module) for module in model.modules()):
        return
    # mmengine does not find the "module." of wrappers inside the model again
    plain_names = names.plain_names(model)
    for part, front in (('state_dict', ''), ('ema_state_dict', 'module.')):
        if part in checkpoint:
            plain = {front + key: front + name for key, name in plain_names.items()}
            checkpoint[part] = names.renamed(checkpoint[part], lambda key, plain=plain: plain.get(key, key))  # type: ignore[misc]


def _numbers(state: Any) -> Any:
    """Without the methods that schedulers keep among their numbers."""
    return {key: value for key, value in state.items() if not callable(value)} if isinstance(state, dict) else state


def write_whole_file(
    original: Callable[..., None],
    checkpoint: dict[str, Any],
    filename: str,
    file_client_args: Any = None,
    backend_args: Any = None,
) -> None:
    """Replaces mmengine's function ``save_checkpoint``: local files are written whole or not at all, shards by all ranks."""
    if shard_files.hand_over(checkpoint, filename.removeprefix('file://')):
        if file_client_args is not None or not is_local(filename, backend_args):
            raise CheckpointWriteError(f'{filename} is on a server, and shards can be written to a local folder alone.')
        return
    if _given_meta.get() is None or file_client_args is not None or not is_local(filename, backend_args):
        original(checkpoint, filename, file_client_args, backend_args)
        return
    path = filename.removeprefix('file://')
    checkpoint_file.save(checkpoint, path)
    if 'optimizer' in checkpoint:
        _warn_if_unreadable(path)


_warned = False


def _warn_if_unreadable(path: str) -> None:
    """Read a new file back, once, so that a warning comes now and no error when the run is resumed."""
    global _warned
    if _warned:
        return
    try:
        checkpoint_file.load(path, check=False, mmap=True)
    except AmpCheckpointError as error:
        _warned = True
        warn(f'this checkpoint cannot be resumed from: {error}')


# -- CheckpointHook ----------------------------------------------------------------------------------------------------


def save_with_step(original: Callable[..., None], hook: Any, runner: Any, step: int, meta: dict[str, Any]) -> None:
    """Replaces ``CheckpointHook._save_checkpoint_with_step``: gathers states of all ranks, and deletes old files last."""
    collect_states(runner)
    if not wrappers_of(runner):
        original(hook, runner, step, meta)
        return
    mark_save(runner)
    with _removals_after(hook, runner):
        original(hook, runner, step, meta)
    if hook.save_optimizer and is_main_process() and isinstance(hook.file_backend, LocalBackend):
        preempted = Path(hook.out_dir) / PREEMPTED
        shard_files.after_writing(runner, lambda: checkpoint_file.remove(preempted))


def save_best(original: Callable[..., None], hook: Any, runner: Any, metrics: dict[str, Any]) -> None:
    """Replaces ``CheckpointHook._save_best_checkpoint``: deletes the old file last."""
    if not hook.save_best:
        return
    with _removals_after(hook, runner):
        original(hook, runner, metrics)


def publish_model(original: Callable[..., None], hook: Any, runner: Any, ckpt_path: str) -> None:
    """Replaces ``CheckpointHook._publish_model``: published files are written whole or not at all."""
    shard_files.settle(runner)
    with _saving(runner, {}):
        original(hook, runner, ckpt_path)


@contextmanager
def _removals_after(hook: Any, runner: Any) -> Iterator[None]:
    """Inside, what the hook deletes is only remembered; it goes when everything was written."""
    backend = hook.file_backend if wrappers_of(runner) else None
    # where one method calls the other, the outer one is waited for
    if not isinstance(backend, LocalBackend) or 'remove' in vars(backend):
        yield
        return
    # before it counts what is there
    shard_files.settle(runner)
    waiting: list[str] = []

    def remember(path: Any) -> None:
        waiting.append(str(path))
        # saved in the file that is written next: a resumed run removes what this one may have no time for
        runner.message_hub.update_info(WAITING, list(waiting))

    backend.remove = backend.rmtree = remember
    try:
        yield
    finally:
        del backend.remove, backend.rmtree

    def remove() -> None:
        for path in waiting:
            # a run that was resumed from the file of another leaves the other's files alone
            if _is_removable(path, hook):
                (backend.rmtree if Path(path).is_dir() else backend.remove)(path)
        runner.message_hub.update_info(WAITING, [])

    shard_files.after_writing(runner, remove)


def _is_removable(path: str, hook: Any) -> bool:
    """Whether a file lies in the hook's folder, and is none that the hook counts as present: names may come again."""
    kept = [hook.last_ckpt, getattr(hook, 'best_ckpt_path', None), *getattr(hook, 'best_ckpt_path_dict', {}).values()]
    numbered = [hook.filename_tmpl.format(step) for step in getattr(hook, 'keep_ckpt_ids', ())]
    kept += [Path(hook.out_dir) / name for name in numbered]
    target = Path(path).resolve()
    return target.parent == Path(hook.out_dir).resolve() and target not in {Path(p).resolve() for p in kept if p}


def mark_save(runner: Any) -> None:
    """Note a new mark behind those of the files saved before, so that files can be put in order without a clock.

    Args:
        runner: About to save a checkpoint that can be resumed from.
    """
    before = runner.message_hub.runtime_info.get(newest_checkpoint.SAVES) or []
    runner.message_hub.update_info(newest_checkpoint.SAVES, [*before[-31:], uuid.uuid4().hex[:12]])


def collect_states(runner: Any) -> None:
    """Let every hook that has something to gather from all ranks do so: saving itself runs on rank 0 alone.

    Args:
        runner: On every rank, right before a checkpoint is saved.
    """
    for hook in runner.hooks:
        collect = getattr(hook, 'collect_states', None)
        if collect is not None:
            collect(runner)


# -- before the training -----------------------------------------------------------------------------------------------


def prepare_folders(runner: Any) -> None:
    """Tidy up what a killed run left in the folders of the checkpoint hooks, and find out whether they can be written to.

    Args:
        runner: About to train; its other hooks are ready.
    """
    if not wrappers_of(runner):
        return
    # of another training in this process, which may have ended with an error
    shard_writer.wait_for_the_last()
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or not hook.out_dir:
            continue
        is_here = is_local(hook.out_dir, hook.backend_args)
        kind = getattr(runner.model, 'checkpoints', 'whole')
        if kind != 'whole' and not is_here:
            raise AmpConfigError(
                [
                    f'checkpoints={kind!r} and out_dir={hook.out_dir!r}: shards are written to a folder that all ranks see, '
                    f"and to no server. Choose a local out_dir, or checkpoints='whole'."
                ]
            )
        if is_here:
            # mmengine forgets it at a resume, so that a new best score would not be written into it
            last = runner.message_hub.runtime_info.get('last_ckpt')
            if hook.last_ckpt is None and isinstance(last, str) and Path(last).exists():
                hook.last_ckpt = last
            if kind != 'whole':
                shard_files.check_folder(hook.out_dir, kind)
            if is_main_process():
                _tidy_up(hook, runner)
                checkpoint_file.check_writable(hook.out_dir)


def _tidy_up(hook: Any, runner: Any) -> None:
    removed = folder.remove_leftovers(hook.out_dir)
    source = Path(str(getattr(runner, '_load_from', None)))
    written = source.stat().st_mtime if source.exists() else float('inf')
    for waiting in runner.message_hub.runtime_info.get(WAITING) or ():
        # whatever a file says, nothing but checkpoints of this very folder is removed
        path = Path(waiting).absolute()
        mine = path.suffix == Path(hook.filename_tmpl).suffix and _is_removable(waiting, hook)
        # what is younger than the list belongs to another run in this folder
        if mine and (path.is_file() or folder.is_folder(path)) and path.stat().st_mtime <= written:
            checkpoint_file.remove(path)
            removed.append(path.name)
    if removed:
        runner.logger.info(f'amp: removed what an interrupted run left behind: {", ".join(removed)}')
