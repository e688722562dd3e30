"""The states of the random generators of a process, as plain tensors, numbers and lists."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from . import schema

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
        states: That :func:`check` has taken.
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
    """Validate saved states, applying nothing.

    Args:
        states: From a checkpoint.
        name: How messages call it.

    Raises:
        AmpCheckpointError: Names the key and what was expected.
    """
    STATES.check(states, name, show=False)


def _words(count: int) -> schema.Is:
    """The words of a Mersenne twister: whole numbers that lose all their bits when they are shifted by 32."""

    def accepts(value: Any) -> bool:
        good = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (count,)
        return good and bool((value >> 32 == 0).all())

    return schema.Is(f'{count} words of 32 bits', accepts)


def _is_state(value: torch.Tensor) -> bool:
    try:
        torch.Generator().set_state(value.cpu())
    except (RuntimeError, TypeError):
        return False
    return True


_BYTES = schema.Is(
    'a vector of bytes',
    lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1,
)
_GENERATOR = schema.Both(
    _BYTES, schema.Is('', _is_state, '{path} is no state of a torch generator: the file is damaged.')
)
_POSITION = '{path}[-1] must be 0 to ' + f'{_NUMPY_LENGTH}: the file is damaged.'
_PYTHON = schema.Record(
    {
        'version': schema.exactly(random.getstate()[0]),
        # the last word is the position among the others
        'state': schema.Both(_words(_PYTHON_LENGTH), schema.Is('', lambda v: int(v[-1]) <= _NUMPY_LENGTH, _POSITION)),
    },
    {'gauss': schema.Maybe(schema.kind('a number or None', float))},
)
_NUMPY = schema.Record(
    {
        'kind': schema.exactly('MT19937'),
        'state': _words(_NUMPY_LENGTH),
        'position': schema.between(0, _NUMPY_LENGTH),
        'has_gauss': schema.between(0, 1),
        'gauss': schema.kind('a number', float),
    }
)
#: What :func:`capture` gives. How long a GPU's state is only a GPU could say.
STATES = schema.Record(
    {
        'python': _PYTHON,
        'numpy': _NUMPY,
        'torch': _GENERATOR,
        'cuda': schema.ListOf(_BYTES),
        'generators': schema.ListOf(_GENERATOR),
    }
)
