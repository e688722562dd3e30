"""Writes the shards of all ranks to a folder, at once or in a thread; the folder has its name when all of them have."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import CheckpointWriteError, logger
from . import file, folder


class Pending:
    """A checkpoint that is being written; made by :func:`write`.

    Args:
        target: What the folder will be called.
        written: Ends when the folder has its name.
    """

    def __init__(self, target: Path, written: Future[None]) -> None:
        self._target = target
        self._written = written
        self._is_told = False

    def finish(self) -> None:
        """Wait until the folder has its name: until all ranks have written their shards.

        Raises:
            CheckpointWriteError: On every rank, where any could not write. A folder of the name is what it was.
        """
        self._is_told = True
        self._written.result()

    def wait(self) -> None:
        """As :meth:`finish`; where nobody has called that, what went wrong is a line in the log."""
        error = self._written.exception()
        if error is not None and not self._is_told:
            self._is_told = True
            logger.warning(f'amp: {error}')


def write(
    rest: Any, tensors: Mapping[str, Tensor], path: str | os.PathLike[str], asynchronous: bool = False
) -> Pending:
    """Write what :func:`amp_wrapper.checkpoint.sharded.split` has taken apart. Collective, over all ranks.

    Args:
        rest: Taken from rank 0.
        tensors: The same names on every rank.
        path: The folder; one of the same name is replaced.
        asynchronous: Whether the shards are copied to the CPU, and written by a thread.

    Returns:
        What to wait for.

    Raises:
        CheckpointWriteError: On every rank, where any could not write what is written before a thread begins.
    """
    target = Path(path).expanduser()
    part = folder.part_of(target)
    group = _group_beside() if asynchronous else None
    # two that write at once would take turns in the same group
    wait_for_the_last()
    with _together(target, group):
        if _place()[0] == 0:
            file.remove(part)
            (part / folder.TENSORS).mkdir(parents=True)
            file.save(rest, part / folder.REST)
    if not asynchronous:
        _write(dict(tensors), target, None)
        done: Future[None] = Future()
        done.set_result(None)
        return Pending(target, done)
    copies = {name: tensor.detach().to('cpu', copy=True) for name, tensor in tensors.items()}
    return _in_a_thread(copies, target, group)


def _write(tensors: dict[str, Tensor], target: Path, group: ProcessGroup | None) -> None:
    """Write the shards of all ranks, and give the folder its name. Collective over ``group``; None: over all."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_now

    part = folder.part_of(target)
    rank, world = _place()
    try:
        with _together(target, group):
            writer = FileSystemWriter(part / folder.TENSORS, single_file_per_rank=True, sync_files=True)
            # torch 2.6 has no such argument, and finds out by itself whether there are other processes
            alone: dict[str, Any] = {}
            if world == 1 and 'no_dist' in inspect.signature(save_now).parameters:
                alone['no_dist'] = True
            with quiet() if world == 1 else contextlib.nullcontext():
                save_now(tensors, storage_writer=writer, process_group=group, **alone)
        mine: dict[str, folder.Seen] = {}
        with _together(target, group):
            mine = {each.name: folder.look_at(each) for each in sorted((part / folder.TENSORS).glob(f'__{rank}_*'))}
        found: list[Any] = [mine]
        if world > 1:
            found = [None] * world
            torch.distributed.all_gather_object(found, mine, group=group)
        with _together(target, group):
            if rank == 0:
                listed = {f'{folder.TENSORS}/{name}': seen for each in found for name, seen in each.items()}
                for name in (folder.REST, f'{folder.TENSORS}/.metadata'):
                    listed[name] = folder.look_at(part / name)
                folder.make(target, listed)
    finally:
        if rank == 0:
            file.remove(part)


_last: Pending | None = None


def wait_for_the_last() -> None:
    """Wait until what was begun last in this process is written, or could not be."""
    if _last is not None:
        _last.wait()


def _in_a_thread(tensors: dict[str, Tensor], target: Path, group: ProcessGroup | None) -> Pending:
    global _last
    written: Future[None] = Future()

    def run() -> None:
        failed: BaseException | None = None
        try:
            _write(tensors, target, group)
        except CheckpointWriteError as error:
            failed = error
        except BaseException as error:  # a rank that has died, say
            failed = CheckpointWriteError(f'{target} could not be written: {type(error).__name__}: {error}')
        # the copies are gone when somebody learns of it
        tensors.clear()
        if failed is None:
            written.set_result(None)
        else:
            written.set_exception(failed)

    # a process waits for its threads before it ends
    threading.Thread(target=run, name=f'writes {target.name}').start()
    _last = Pending(target, written)
    return _last


_beside: tuple[Any, ProcessGroup] | None = None


def _group_beside() -> ProcessGroup | None:
    """A group of all ranks for threads: the collectives of two threads must not meet. Collective, once. None: one process."""
    global _beside
    if _place()[1] == 1:
        return None
    world = torch.distributed.group.WORLD
    if _beside is None or _beside[0] is not world:
        _beside = (world, torch.distributed.new_group(backend='gloo'))
    return _beside[1]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch says nothing of there being one process: it warns, and that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        yield


def _place() -> tuple[int, int]:
    """The number of this rank, and of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@contextlib.contextmanager
def _together(target: Path, group: ProcessGroup | None) -> Iterator[None]:
    """An error on one rank is one on all of them, at the end of the block."""
    problem: str | None = None
    cause: BaseException | None = None
    try:
        yield
    except BaseException as error:
        # torch's error of all ranks is no Exception
        failures = getattr(error, 'failures', None)
        if not isinstance(error, Exception) and failures is None:
            raise
        shown = next(iter(failures.values()))[0] if failures else error
        problem, cause = f'{type(shown).__name__}: {shown}', error
    world = _place()[1]
    problems: list[Any] = [problem]
    if world > 1:
        problems = [None] * world
        torch.distributed.all_gather_object(problems, problem, group=group)
    said = {rank: text for rank, text in enumerate(problems) if text}
    if said:
        first = min(said)
        raise CheckpointWriteError(
            f'{target} could not be written: rank {first}: {said[first][:500]}. Checkpoints written before are untouched.'
        ) from cause
