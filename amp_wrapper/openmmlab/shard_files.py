"""Checkpoints of sharded runs of mmengine: which file or folder is written, by whom, and what of it a rank reads.

mmengine asks for states on rank 0 alone, and lets hooks change what it is about to save. For a whole file, rank 0 is given
whole states. For a folder of shards it is given a stand-in for each sharded tensor; where those are in the end, the shards of
all ranks are written.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import (
    all_gather_object,
    barrier,
    broadcast_object_list,
    get_rank,
    get_world_size,
    is_main_process,
)
from torch import Tensor, nn

from ..checkpoint import file as checkpoint_file
from ..checkpoint import folder, sharded
from ..errors import AmpCheckpointError, AmpConfigError, AmpUsageError, CheckpointWriteError
from ..shards import any_sharded, is_sharded
from . import sharded_states
from .log import warn

#: How a sharded model is saved: a whole file by rank 0, a folder of shards, or the same while the training goes on.
KINDS = ('whole', 'sharded', 'async')

# what mmengine has handed over to be written as shards; None where files are written as they are
_handed_over: ContextVar[list[tuple[Any, str]] | None] = ContextVar('_handed_over', default=None)


class StandIn(Tensor):
    """In the place of a sharded tensor on its way into a file: it has a shape and a type, and no values."""

    source: str

    @classmethod
    def of(cls, tensor: Tensor, source: str) -> StandIn:
        """One for a sharded tensor.

        Args:
            tensor: The sharded one.
            source: What it is called.
        """
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device='meta').as_subclass(cls)
        made.source = source
        return made

    def __deepcopy__(self, memo: Any) -> StandIn:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers questions, and refuses to compute."""
        name = getattr(func, '__name__', '')
        if name in ('cpu', 'detach', 'contiguous'):
            return args[0]
        if name in ('__get__', 'size', 'dim', 'numel', 'element_size', 'is_floating_point', 'is_complex', '__repr__'):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise AmpUsageError(
            f'{name} of a sharded weight, while a checkpoint of shards is saved: a hook computes with what is being saved, and '
            f"no rank has it as a whole. Write checkpoints='whole', or do without the hook."
        )


@contextmanager
def saving(runner: Any, with_optimizer: bool = True) -> Iterator[None]:
    """Inside, mmengine saves a checkpoint of a runner on rank 0. Collective.

    Args:
        runner: On every rank; its model is sharded or not.
        with_optimizer: Whether the optimizer is part of it.

    Raises:
        CheckpointWriteError: On every rank, where a rank could not write its shards.
    """
    if _handed_over.get() is not None:
        yield
        return
    kind = getattr(runner.model, 'checkpoints', 'whole')
    inner = getattr(runner.model, 'module', None)
    if kind == 'whole' or not isinstance(inner, nn.Module) or not any_sharded(inner.parameters()):
        with sharded_states.gathered(runner, with_optimizer):
            yield
        return
    settle(runner)
    owners = sharded_states.owners_of(runner, with_optimizer)
    sources: dict[str, Tensor] = {}
    states = [_with_stand_ins(owner.state_dict(), str(index), sources) for index, owner in enumerate(owners)]
    handed_over: list[tuple[Any, str]] = []
    token = _handed_over.set(handed_over)
    failed: BaseException | None = None
    try:
        with contextlib.ExitStack() as stack:
            if is_main_process():
                for owner, state in zip(owners, states):
                    stack.enter_context(sharded_states.giving(owner, state))
            yield
    except BaseException as error:
        failed = error
        raise
    finally:
        _handed_over.reset(token)
        if failed is None or is_main_process():
            runner.model.pending = _write(handed_over, sources, kind == 'async', failed)


def _with_stand_ins(value: Any, name: str, sources: dict[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        made = sharded_states.like_it(value)
        for key, item in value.items():
            made[key] = _with_stand_ins(item, f'{name}/{key}', sources)
        return made
    if isinstance(value, (list, tuple)):
        items = [_with_stand_ins(item, f'{name}/{index}', sources) for index, item in enumerate(value)]
        return sharded.rebuilt(value, items)
    if not is_sharded(value):
        return value
    sources[name] = value
    return StandIn.of(value, name)


def hand_over(checkpoint: Any, path: str) -> bool:
    """Whether what mmengine is about to write will be written as shards instead: where something in it is sharded.

    Args:
        checkpoint: As all hooks have left it.
        path: A local one.
    """
    waiting = _handed_over.get()
    if waiting is None or not sharded.split(checkpoint, _is_stand_in)[1]:
        return False
    waiting.append((checkpoint, path))
    return True


def _is_stand_in(tensor: Any) -> bool:
    return isinstance(tensor, StandIn)


def _write(
    handed_over: list[tuple[Any, str]], sources: Mapping[str, Tensor], asynchronous: bool, failed: BaseException | None
) -> sharded.Pending | None:
    """Write what rank 0 was about to write; the others learn which of their shards goes where."""
    plan: list[Any] = [[]]
    rests: list[Any] = []
    if failed is not None:
        plan = [f'{type(failed).__name__}: {failed}']
    elif is_main_process():
        for checkpoint, path in handed_over:
            rest, found = sharded.split(checkpoint, _is_stand_in)
            _warn_if_unreadable(rest, path)
            rests.append(rest)
            plan[0].append(
                (path, {name: tensor.source for name, tensor in found.items() if isinstance(tensor, StandIn)})
            )
    broadcast_object_list(plan)
    if failed is not None:
        return None
    if isinstance(plan[0], str):
        raise CheckpointWriteError(f'rank 0 could not save a checkpoint: {plan[0]}')
    pending = None
    for index, (path, names) in enumerate(plan[0]):
        rest = rests[index] if rests else None
        tensors = {name: sources[source] for name, source in names.items()}
        pending = sharded.write(rest, tensors, path, asynchronous)
    return pending


_warned = False


def _warn_if_unreadable(rest: Any, path: str) -> None:
    """Read back what is not sharded, so that a warning comes now, once, and no error when the run is resumed."""
    global _warned
    if _warned:
        return
    stream = io.BytesIO()
    try:
        torch.save(rest, stream)
    except Exception:
        # an error of writing, which comes on all ranks
        return
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if 'GLOBAL' in line]
        _warned = True
        warn(f'{path} cannot be resumed from: it asks for code to run while it is read ({" ".join(lines)[:300]})')


def settle(runner: Any) -> None:
    """Wait until a checkpoint that is being written has its name, and remove what it replaces.

    Args:
        runner: On every rank.

    Raises:
        CheckpointWriteError: It could not be written.
    """
    pending = getattr(runner.model, 'pending', None)
    # where the checkpoint could not be written, what it would have replaced stays
    afterwards = vars(runner).pop('_amp_wrapper_afterwards', ())
    if pending is not None:
        runner.model.pending = None
        pending.finish()
    for act in afterwards:
        act()


def after_writing(runner: Any, act: Callable[[], None]) -> None:
    """Do something when the checkpoint that was saved last has its name: at once, unless it is still being written."""
    if getattr(runner.model, 'pending', None) is None:
        act()
    else:
        vars(runner).setdefault('_amp_wrapper_afterwards', []).append(act)


def verify(path: str) -> None:
    """Compare a file with its checksums; of a folder of shards each rank compares a part, and damage is an error on all.

    Args:
        path: A local file or folder. Collective.

    Raises:
        AmpCheckpointError: Names the file.
    """
    seen = [sharded.is_folder(path)]
    broadcast_object_list(seen)
    if not seen[0]:
        checkpoint_file.verify(path)
        return
    problem = None
    try:
        folder.verify(path, get_rank(), get_world_size())
    except AmpCheckpointError as error:
        problem = str(error)
    problems = [each for each in all_gather_object(problem) if each]
    if problems:
        raise AmpCheckpointError(problems[0])


def check_folder(path: str, kind: str) -> None:
    """Find out before the training whether all ranks can write to one folder. Collective.

    Args:
        path: Of the checkpoints.
        kind: Of :data:`KINDS`.

    Raises:
        AmpConfigError: They cannot.
    """
    name = [uuid.uuid4().hex]
    broadcast_object_list(name)
    probe = Path(path) / f'{name[0]}{checkpoint_file.PART_SUFFIX}'
    mine = probe.with_name(f'{name[0]}-{get_rank()}{checkpoint_file.PART_SUFFIX}')
    problem = _problem_of_writing(probe) if is_main_process() else None
    barrier()
    if problem is None and not probe.is_file():
        problem = f'rank {get_rank()} does not see what rank 0 writes to {path}'
    problem = problem or _problem_of_writing(mine)
    problems = [each for each in all_gather_object(problem) if each]
    for each in (mine, *([probe] if is_main_process() else [])):
        checkpoint_file.remove(each)
    if problems:
        raise AmpConfigError(
            [
                f'checkpoints={kind!r}, and {problems[0]}: each rank writes its shards to one folder, which has to be on a '
                "file system that all ranks share. Choose another out_dir or work_dir, or write checkpoints='whole'."
            ]
        )


def _problem_of_writing(path: Path) -> str | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'')
    except OSError as error:
        return f'rank {get_rank()} cannot write to {path.parent} ({error.strerror})'
    return None


def load(runner: Any, path: str, map_location: Any) -> Any:
    """Read a folder of shards: of what is sharded in a runner's model and optimizers, the part of this rank.

    Args:
        runner: That is loading; None for whole tensors.
        path: The folder.
        map_location: Of whole tensors.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else 'cpu'
    if runner is None:
        return sharded.load(path, map_location=device, check=False)
    layouts, saved = sharded_states.layouts_of(runner), sharded.shapes(path)

    def like(name: str) -> Tensor | None:
        known = layouts(name)
        return known if known is not None and known.shape == saved[name] else None

    return sharded.load(path, like, device, check=False)
