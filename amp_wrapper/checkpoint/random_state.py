"""The states of the random generators of a process, as plain tensors, numbers and lists."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import AmpCheckpointError

_PYTHON_LENGTH = 625
_NUMPY_LENGTH = 624


def capture(generators: Iterable[torch.Generator] = (), all_devices: bool = True) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators and of some more.

    Args:
        generators: Further generators, of samplers and data loaders say.
        all_devices: Whether every visible GPU counts, or the current one alone (one process per GPU).

    Returns:
        Tensors (uint8 and int64, on the CPU), numbers and lists only.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        'python': {'version': version, 'state': torch.tensor(numbers, dtype=torch.int64), 'gauss': gauss},
        'numpy': {
            'kind': str(kind),
            'state': torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            'position': int(position),
            'has_gauss': int(has_gauss),
            'gauss': float(cached),
        },
        'torch': torch.get_rng_state(),
        'cuda': [],
        'generators': [generator.get_state().clone() for generator in generators],
    }
    if torch.cuda.is_available():
        states['cuda'] = torch.cuda.get_rng_state_all() if all_devices else [torch.cuda.get_rng_state()]
    return states


def restore(states: Mapping[str, Any], generators: Iterable[torch.Generator] = ()) -> list[str]:
    """Set the generators to states of :func:`capture`.

    Args:
        states: Judged by :func:`check`.
        generators: In the order they were captured in.

    Returns:
        One sentence for each generator that could not be set: GPUs that are not here, generators that are new.
    """
    python, legacy = states['python'], states['numpy']
    random.setstate((python['version'], tuple(python['state'].tolist()), python['gauss']))
    keys = legacy['state'].cpu().numpy().astype(np.uint32)
    np.random.set_state((legacy['kind'], keys, legacy['position'], legacy['has_gauss'], legacy['gauss']))
    torch.set_rng_state(states['torch'].cpu())
    notes = []
    cuda = [state.cpu() for state in states['cuda']]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(cuda) == 1 and here:
        torch.cuda.set_rng_state(cuda[0])
    else:
        for index, state in enumerate(cuda[:here]):
            torch.cuda.set_rng_state(state, index)
    if bool(cuda) != bool(here) or len(cuda) > max(here, 1):
        notes.append(f'the states of {len(cuda)} GPU generators were saved and {here} GPUs are here')
    mine = list(generators)
    if len(mine) != len(states['generators']):
        notes.append(f'{len(states["generators"])} generators of the data were saved and {len(mine)} are here')
    for generator, state in zip(mine, states['generators']):
        generator.set_state(state.cpu())
    return notes


def check(states: Any, name: str) -> None:
    """Judge saved states, applying nothing.

    Args:
        states: From a checkpoint.
        name: How messages call it.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    _need(isinstance(states, Mapping), name, 'a dict')
    for key in ('python', 'numpy'):
        _need(isinstance(states.get(key), Mapping), f'{name}[{key!r}]', 'a dict')
    python, legacy = states['python'], states['numpy']
    version = python.get('version')
    good = isinstance(version, int) and version == random.getstate()[0]
    _need(good, f"{name}['python']['version']", f'{random.getstate()[0]}')
    _need_words(python.get('state'), _PYTHON_LENGTH, f"{name}['python']['state']")
    _need(0 <= int(python['state'][-1]) <= _NUMPY_LENGTH, f"{name}['python']['state'][-1]", f'0 to {_NUMPY_LENGTH}')
    gauss = python.get('gauss')
    _need(gauss is None or isinstance(gauss, float), f"{name}['python']['gauss']", 'a number or None')
    _need(isinstance(legacy.get('kind'), str) and legacy['kind'] == 'MT19937', f"{name}['numpy']['kind']", "'MT19937'")
    _need_words(legacy.get('state'), _NUMPY_LENGTH, f"{name}['numpy']['state']")
    for key, high in (('position', _NUMPY_LENGTH), ('has_gauss', 1)):
        value = legacy.get(key)
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= high
        _need(good, f"{name}['numpy'][{key!r}]", f'a whole number from 0 to {high}')
    _need(isinstance(legacy.get('gauss'), float), f"{name}['numpy']['gauss']", 'a number')
    _need_generator(states.get('torch'), f"{name}['torch']", torch.Generator())
    for key in ('cuda', 'generators'):
        items = states.get(key)
        _need(isinstance(items, (list, tuple)), f'{name}[{key!r}]', 'a list')
        assert items is not None
        for index, item in enumerate(items):
            # how long a GPU's state is only a GPU could say
            own = torch.Generator() if key == 'generators' else None
            _need_generator(item, f'{name}[{key!r}][{index}]', own)


def _need(good: bool, name: str, expected: str) -> None:
    if not good:
        raise AmpCheckpointError(f'{name} must be {expected}: the file is damaged.')


def _need_words(value: Any, length: int, name: str) -> None:
    good = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and tuple(value.shape) == (length,)
    _need(good and bool((value >= 0).all()) and bool((value < 2**32).all()), name, f'{length} words of 32 bits')


def _need_generator(value: Any, name: str, model: torch.Generator | None) -> None:
    good = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1
    _need(good, name, 'a vector of bytes')
    if model is None:
        return
    try:
        model.set_state(value.cpu())
    except (RuntimeError, TypeError) as error:
        raise AmpCheckpointError(f'{name} is no state of a torch generator ({error}): the file is damaged.') from error
