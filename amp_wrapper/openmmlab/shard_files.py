"""Checkpoints of sharded runs of mmengine: whole files of rank 0, or folders to which each rank writes its shards.

``torch.distributed.checkpoint`` writes and reads the shards. Beside them lie what is not sharded, from rank 0, and a list of
the files with their checksums. A folder has its name when all ranks have written.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, is_main_process
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn

from .. import distributed_internals
from ..checkpoint import file
from ..errors import AmpCheckpointError, CheckpointWriteError
from ..shards import any_sharded, is_sharded, shard_like, whole
from ..torch_internals import is_zero
from .attaching import averages_of
from .sharding import MMFullyShard

#: The parts of a folder: shards, what is not sharded, and the list of files with their checksums.
TENSORS, REST, LIST = 'tensors', 'rest.pth', 'files.json'
#: What stands in the place of a sharded tensor: a dict of this key, and the name under which the tensor was written.
PLACE = '_amp_wrapper_sharded_tensor'
#: What torch pickles into the metadata: classes that hold values.
METADATA_CLASSES = {
    'torch.distributed.checkpoint.filesystem': ('_StorageInfo',),
    'torch.serialization': ('_get_layout',),
    'torch': ('Size',),
    'collections': ('OrderedDict',),
    'pathlib': ('PosixPath', 'WindowsPath', 'PurePosixPath', 'PureWindowsPath'),
}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists and dicts with other values in places; ``_metadata`` of a state dict goes along."""
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = _mapped(item, change)
        return made
    return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value


# -- saving -----------------------------------------------------------------------------------------------------------


def save_checkpoint(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Save on all ranks, where something is sharded, or divided by ``ZeroRedundancyOptimizer`` (mmengine would wait forever).

    For a folder of shards, mmengine's hooks are called on all ranks.
    """
    wrapper = getattr(runner, 'optim_wrapper', None)
    members = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    steppers: list[Any] = [getattr(member, 'optimizer', None) for member in members]
    owners: list[Any] = []
    if isinstance(runner.model, MMFullyShard) and runner.model.is_sharded:
        if runner.model.checkpoints == 'sharded':
            # mmengine's is for rank 0 alone
            original.__wrapped__(runner, *args, **kwargs)  # type: ignore[attr-defined]
            return
        owners = [runner.model.module, *averages_of(runner), *([wrapper] if isinstance(wrapper, OptimWrapper) else [])]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with contextlib.ExitStack() as stack:
        for zero in filter(is_zero, steppers if kwargs.get('save_optimizer', True) else ()):
            zero.consolidate_state_dict(to=0)
            if is_main_process():
                # mmengine's would ask all ranks once more
                stack.enter_context(_with_state(zero, ZeroRedundancyOptimizer.state_dict(zero)))
        for owner in owners:
            # one tensor is whole on the other ranks at a time
            state = _mapped(owner.state_dict(), _gathered)
            if is_main_process():
                stack.enter_context(_with_state(owner, state))
        original(runner, *args, **kwargs)


def _gathered(value: Any) -> Any:
    if not is_sharded(value):
        return value
    full = whole(value.detach())
    return full.cpu() if is_main_process() else None


@contextlib.contextmanager
def _with_state(owner: Any, state: Any) -> Iterator[None]:
    """Inside, the state dict of an object is a given one."""
    owner.state_dict = lambda *args, **kwargs: state
    try:
        yield
    finally:
        del owner.state_dict


def write_checkpoint(original: Callable[..., None], checkpoint: Any, filename: str, *args: Any, **kwargs: Any) -> None:
    """Write what mmengine has collected: to a folder by all ranks, where something in it is sharded."""
    if any_sharded(checkpoint.get('state_dict', {}).values()):
        write_folder(checkpoint, Path(filename.removeprefix('file://')))
    else:
        original(checkpoint, filename, *args, **kwargs)


def write_folder(checkpoint: Any, path: Path) -> None:
    """Write a checkpoint to a folder that all ranks see. Collective.

    Args:
        checkpoint: Nested dicts and lists. Each rank writes its shards; all else is taken from rank 0.
        path: The folder; one of the same name is replaced.

    Raises:
        CheckpointWriteError: On every rank, where any could not write. A folder of the name is what it was.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    part = path.with_name(path.name + file.PART_SUFFIX)
    tensors: dict[str, Tensor] = {}

    def take_out(value: Any) -> Any:
        if not is_sharded(value):
            return value
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {PLACE: name}

    rest = _mapped(checkpoint, take_out)

    def prepare() -> None:
        if path.is_dir() and not (path / LIST).is_file():
            raise FileExistsError(f'{path} is a folder, and no checkpoint')
        file.remove(part)
        (part / TENSORS).mkdir(parents=True)
        file.save(rest, part / REST)

    _on_main(path, prepare)
    try:
        save(tensors, storage_writer=FileSystemWriter(part / TENSORS, single_file_per_rank=True))
    except CheckpointException as error:
        raise CheckpointWriteError(f'{path} could not be written: {error}') from error
    mine = {each.name: _look_at(each) for each in (part / TENSORS).glob(f'__{get_rank()}_*')}
    listed = {f'{TENSORS}/{name}': value for each in all_gather_object(mine) for name, value in each.items()}

    def finish() -> None:
        for name in (REST, f'{TENSORS}/.metadata'):
            listed[name] = _look_at(part / name)
        (part / LIST).write_text(json.dumps(listed, indent=1))
        with file.replacing(path):
            pass

    _on_main(path, finish)


def _on_main(path: Path, act: Callable[[], None]) -> None:
    """Do something on rank 0; its error is one on all ranks."""
    said: list[Any] = [None]
    if is_main_process():
        try:
            act()
        except OSError as error:
            said[0] = str(error)
    broadcast_object_list(said)
    if said[0] is not None:
        raise CheckpointWriteError(f'{path} could not be written by rank 0: {said[0]}')


def _look_at(path: Path) -> list[int]:
    """Size and checksum of a file."""
    checksum = 0
    with open(path, 'rb') as stream:
        while chunk := stream.read(2**22):
            checksum = zlib.crc32(chunk, checksum)
    return [path.stat().st_size, checksum]


# -- loading ----------------------------------------------------------------------------------------------------------


def verify_folder(path: Path) -> None:
    """Compare every file of a folder with its checksum.

    Raises:
        AmpCheckpointError: Missing, incomplete or changed; names the file.
    """
    try:
        listed = json.loads((path / LIST).read_text())
        bad = [name for name, value in listed.items() if _look_at(path / name) != value]
    except (OSError, ValueError, AttributeError) as error:
        raise AmpCheckpointError(f'{path} is no complete checkpoint ({error}).') from error
    if bad:
        raise AmpCheckpointError(f'{path} is damaged: {bad[0]} is not what was written. Use an earlier checkpoint.')


class _Metadata(pickle.Unpickler):
    """Reads what torch pickles, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Give the classes of metadata, and types of tensors."""
        # the name that Python 3.13 pickles
        module = 'pathlib' if module == 'pathlib._local' else module
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, 0), torch.dtype)
        if is_dtype or module == 'torch.distributed.checkpoint.metadata' or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise AmpCheckpointError(f'a metadata file is refused: it asks for {module}.{name} while it is read.')


def load_folder(path: Path, map_location: Any = 'cpu', model: nn.Module | None = None) -> Any:
    """Read a folder, on any number of ranks, under ``weights_only=True``. No communication.

    Args:
        path: The folder.
        map_location: Where whole tensors go to.
        model: Each rank reads its own shards of what has the shape of a sharded parameter of this model.

    Returns:
        What was saved.

    Raises:
        AmpCheckpointError: Missing, incomplete or changed files, or one that would run code.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    verify_folder(path)
    rest = file.load(path / REST, map_location)
    with open(path / TENSORS / '.metadata', 'rb') as stream:
        metadata = _Metadata(stream).load()
    layouts = {} if model is None else {each.shape: each for each in model.parameters() if is_sharded(each)}
    device = map_location if isinstance(map_location, (str, torch.device)) else 'cpu'
    tensors: dict[str, Tensor] = {}
    for name, saved in metadata.state_dict_metadata.items():
        like, dtype = layouts.get(saved.size), saved.properties.dtype
        if like is None:
            tensors[name] = torch.empty(saved.size, dtype=dtype, device=device)
        else:
            tensors[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    # in torch 2.6, only the deprecated function reads without the other processes
    takes_it = 'no_dist' in inspect.signature(state_dict_loader.load).parameters
    load_now = state_dict_loader.load if takes_it else state_dict_loader.load_state_dict
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='`load_state_dict` is deprecated|torch.distributed is disabled')
        load_now(tensors, storage_reader=Reader(path / TENSORS), no_dist=True)

    def put_in(value: Any) -> Any:
        return tensors[value[PLACE]] if isinstance(value, Mapping) and set(value) == {PLACE} else value

    return _mapped(rest, put_in)


def shard_checkpoint(runner: Any, checkpoint: dict[str, Any]) -> None:
    """Put shards in the place of whole tensors, where the parameters of a runner are sharded.

    Args:
        runner: About to load.
        checkpoint: As it was read; changed in place.
    """
    model = runner.model
    if not (isinstance(model, MMFullyShard) and model.is_sharded):
        return
    for key, owner in (('state_dict', model.module), *(('ema_state_dict', each) for each in averages_of(runner))):
        if key in checkpoint:
            distributed_internals.reshard(owner)
            mine = {name: p for name, p in owner.named_parameters(remove_duplicate=False) if is_sharded(p)}
            made = checkpoint[key] = copy.copy(checkpoint[key])
            for name in made.keys() & mine.keys():
                if not is_sharded(made[name]) and made[name].shape == mine[name].shape:
                    made[name] = shard_like(made[name], mine[name])
