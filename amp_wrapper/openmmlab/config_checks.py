"""What a command checks in a config before mmengine begins to build: its wrappers, its loops, its checkpoint, its data.

mmengine builds these late, behind hundreds of lines of log, and ends with a traceback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mmengine.config import Config
from mmengine.registry import LOOPS, OPTIM_WRAPPERS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

from .. import policy
from ..checkpoint import newest
from ..errors import AmpConfigError, AmpUsageError, nearest
from ..policy import OPTIONS
from . import arguments, config_errors
from .apex_optim_wrapper import ApexOptimWrapper
from .optim_wrapper import AmpOptimWrapper

#: Which loop mmengine takes where the config names none.
_LOOPS = {'val_cfg': ValLoop, 'test_cfg': TestLoop}


def check_parts(cfg: Config, *names: str) -> None:
    """Look for the entries that a command cannot do without.

    Args:
        cfg: The config.
        *names: Of the entries.

    Raises:
        AmpConfigError: Some are missing, or None. A runner of the user's own may do without.
    """
    if cfg.get('runner_type', 'Runner') not in ('Runner', 'FlexibleRunner'):
        return
    missing = [name for name in names if cfg.get(name) is None]
    if missing:
        raise AmpConfigError(
            [
                f'the config has no {", ".join(missing)}: a config of mmengine is expected, with {", ".join(names)}, or one '
                'that inherits them from a _base_.'
            ]
        )


def check_wrappers(cfg: Config) -> None:
    """Read the arguments of the optimizer wrappers as their constructors will; nothing is built.

    Raises:
        AmpConfigError: A level or an option that means nothing, or conflicts; names the wrapper where there are several.
    """
    words = cfg.get('optim_wrapper')
    if not isinstance(words, Mapping):
        return
    problems: list[str] = []
    if 'optimizer' in words or 'type' in words:
        problems += _wrapper_problems(words, 'constructor' not in words)
        problems += config_errors.paramwise_problems(words)
    else:
        for name, member in words.items():
            if isinstance(member, Mapping):
                problems += (f'optim_wrapper.{name}: {problem}' for problem in _wrapper_problems(member, False))
    if problems:
        raise AmpConfigError(problems)


def _wrapper_problems(words: Mapping[str, Any], complete: bool) -> tuple[str, ...]:
    """What is wrong with one wrapper. ``complete``: whether all entries are its arguments; constructors may have own ones."""
    kind = words.get('type', 'OptimWrapper')
    kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if kind not in (AmpOptimWrapper, ApexOptimWrapper):
        # a class of the user's may have arguments of its own
        return ()
    own = inspect.signature(AmpOptimWrapper.__init__).parameters
    defaults = {
        name: parameter.default
        for each in (own, inspect.signature(kind.__init__).parameters)
        for name, parameter in each.items()
        if parameter.default is not inspect.Parameter.empty
    }
    given = {name: value for name, value in words.items() if name not in ('type', 'constructor', 'paramwise_cfg')}
    try:
        if complete:
            chosen = {name: given.pop(name, default) for name, default in defaults.items()}
            on_skip, use_fsdp = chosen.pop('on_skip'), chosen.pop('use_fsdp')
            arguments.resolve(chosen, on_skip, use_fsdp, given, list(defaults))
        else:
            options: Any = {
                name: given.get(name, defaults[name]) for name in ('opt_level', *OPTIONS) if name in defaults
            }
            policy.resolve(**options)
    except AmpConfigError as error:
        return error.problems
    return ()


def check_loops(cfg: Config, *names: str) -> None:
    """Compare the entries of loops with what the loops take.

    Args:
        cfg: The config.
        *names: Of ``train_cfg``, ``val_cfg`` and ``test_cfg``.

    Raises:
        AmpConfigError: An entry that the loop does not take, which mmengine would refuse.
    """
    problems = []
    for name in names:
        words = cfg.get(name)
        if not isinstance(words, Mapping):
            continue
        loop = _loop_of(name, words)
        parameters = {} if loop is None else dict(inspect.signature(loop).parameters)
        if not parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            continue
        known = [each for each in parameters if each not in ('runner', 'dataloader', 'evaluator')]
        known += ['type'] if 'type' in words else ['by_epoch'] if name == 'train_cfg' else []
        problems += [
            f'{name} has an unknown key {key!r}{nearest(str(key), known)}: {getattr(loop, "__name__", loop)} takes '
            f'{", ".join(known)}.'
            for key in words
            # a base of another project brings the name of its scope
            if key not in parameters and key not in known and key != '_scope_'
        ]
    if problems:
        raise AmpConfigError(problems)


def _loop_of(name: str, words: Mapping[str, Any]) -> Callable[..., Any] | None:
    if 'type' in words:
        kind = words['type']
        return LOOPS.get(kind) if isinstance(kind, str) else kind
    if name == 'train_cfg':
        return {True: EpochBasedTrainLoop, False: IterBasedTrainLoop}.get(words.get('by_epoch', True))
    return _LOOPS[name]


def is_url(path: str) -> bool:
    """Whether mmengine fetches a checkpoint from elsewhere: ``https://``, ``torchvision://``, ``open-mmlab://``, ``s3:``."""
    return '://' in path or path.startswith('s3:')


def check_checkpoint(path: str | None) -> None:
    """Look into a checkpoint, without reading its tensors.

    Args:
        path: A file or a folder of shards; None, and the URLs that mmengine knows, pass.

    Raises:
        AmpCheckpointError: It is not there, is no checkpoint, or asks for code to run.
    """
    if path is not None and not is_url(path):
        newest.load_without_shards(path)


def say_where_data_are_missing(runner: Any) -> None:
    """From now on, a file or folder that a data set of the runner does not find is an error of one line.

    Args:
        runner: Whose loops are not built yet.
    """
    for name in ('build_dataloader', 'build_evaluator'):
        setattr(runner, name, functools.partial(_build, getattr(runner, name)))


def _build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except OSError as error:
        text = ' '.join(str(error).split())
        # data sets may know better
        remedy = '' if 'data_root' in text else '; --cfg-options data_root=PATH moves every data set of the config'
        raise AmpUsageError(f'the data cannot be read: {text}{remedy}') from error
