"""Mistakes in a config that mmengine notices while it builds or trains, as errors of one line; and keys that match nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mmengine.registry
from mmengine.config import Config
from mmengine.registry import OPTIMIZERS, Registry
from torch import nn
from torch.optim import Optimizer

from ..errors import AmpConfigError, nearest
from .config_options import last_frame

#: What mmengine's ``DefaultOptimWrapperConstructor`` reads of ``paramwise_cfg``.
PARAMWISE = (
    'lr_mult',
    'decay_mult',
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
    'dcn_offset_lr_mult',
    'bypass_duplicate',
    'custom_keys',
)
_CONSTRUCTOR = 'DefaultOptimWrapperConstructor'
_NOT_REGISTERED = re.compile(r'(\S+) is not in the (?:\S+::)?([\w ]+) registry')


@contextmanager
def typed(cfg: Config) -> Iterator[None]:
    """Around what mmengine builds and trains: some of its errors become an ``AmpConfigError``.

    Args:
        cfg: The config.

    Raises:
        AmpConfigError: A type that no registry has; an argument that an optimizer of torch or of this package refuses; a
            metric in ``save_best`` that the validation does not give.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        problem = (
            _unknown_type(error)
            or _unknown_optimizer(error, cfg)
            or _optimizer_argument(error)
            or _unknown_metric(error)
        )
        if problem is None:
            raise
        raise AmpConfigError([problem]) from error


def _unknown_type(error: Exception) -> str | None:
    found = _NOT_REGISTERED.search(str(error.args[0])) if error.args else None
    if found is None or not _module_of(error).startswith('mmengine.registry.'):
        return None
    name, kind = found[1], found[2]
    roots = [each for each in vars(mmengine.registry).values() if isinstance(each, Registry) and each.name == kind]
    known = {name for root in roots for name in _names(root)}
    return (
        f'type={name!r} is not in the registry of mmengine for {kind}{nearest(name, known)}: correct it, or import the module '
        f"that registers it, by custom_imports = dict(imports=['...']) in the config."
    )


def _module_of(error: Exception) -> str:
    """The module that raised it."""
    frame = last_frame(error)
    return '' if frame is None else str(frame.f_globals.get('__name__', ''))


def _names(registry: Registry) -> Iterator[str]:
    for each in (registry, *registry.children.values()):
        yield from each.module_dict


def _unknown_optimizer(error: Exception, cfg: Config) -> str | None:
    """mmengine asks for the signature of what the registry did not have."""
    if str(error) != 'None is not a callable object':
        return None
    for words in _wrappers(cfg):
        optimizer = words.get('optimizer')
        kind = optimizer.get('type') if isinstance(optimizer, Mapping) else None
        if isinstance(kind, str) and OPTIMIZERS.get(kind) is None:
            return (
                f'optimizer.type={kind!r} is not in the registry of mmengine for optimizers'
                f'{nearest(kind, set(_names(OPTIMIZERS)))}.'
            )
    return None


def _optimizer_argument(error: Exception) -> str | None:
    """What the constructor of an optimizer did not take: a learning rate that is negative, or no number."""
    frame = last_frame(error)
    made = None if frame is None or frame.f_code.co_name != '__init__' else frame.f_locals.get('self')
    if frame is None or not isinstance(made, Optimizer) or isinstance(error, KeyError | AmpConfigError):
        return None
    if frame.f_code is Optimizer.__init__.__code__ or not _module_of(error).startswith(
        ('torch.optim.', 'amp_wrapper.')
    ):
        # parameters rather than arguments, or code of the user
        return None
    names = frame.f_code.co_varnames[2 : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    given = ', '.join(f'{name}={frame.f_locals[name]!r}' for name in names if name in frame.f_locals)
    text = ' '.join(str(error).split())
    return f'optimizer.type={type(made).__name__!r} refuses its arguments ({given}): {text}. Correct optim_wrapper.optimizer.'


def _unknown_metric(error: Exception) -> str | None:
    """Where mmengine's ``CheckpointHook`` looks for the number that it is to compare."""
    frame = last_frame(error)
    if frame is None or frame.f_code.co_name != '_save_best_checkpoint' or not isinstance(error, KeyError):
        return None
    name, metrics = error.args[0], frame.f_locals.get('metrics')
    if not isinstance(metrics, Mapping) or name in metrics:
        return None
    return f'save_best={name!r}{nearest(str(name), metrics)}: the validation gives {", ".join(metrics)}.'


def _wrappers(cfg: Config) -> Iterator[Mapping[str, Any]]:
    words = cfg.get('optim_wrapper')
    if not isinstance(words, Mapping):
        return
    members = [words] if 'optimizer' in words or 'type' in words else list(words.values())
    yield from (member for member in members if isinstance(member, Mapping))


def paramwise_problems(words: Mapping[str, Any]) -> list[str]:
    """Keys of ``paramwise_cfg`` that mmengine would pass over.

    Args:
        words: A wrapper of the config. With a ``constructor`` of its own, nothing is known of the keys.
    """
    given = words.get('paramwise_cfg')
    if not isinstance(given, Mapping) or not _is_default(words):
        return []
    unknown = [key for key in given if key not in PARAMWISE]
    return [
        f'paramwise_cfg has an unknown key {key!r}{near}: mmengine would pass over it. It reads {", ".join(PARAMWISE)}.'
        for key in unknown
        if (near := nearest(str(key), PARAMWISE))
    ]


def _is_default(words: Mapping[str, Any]) -> bool:
    return words.get('constructor', _CONSTRUCTOR) in (_CONSTRUCTOR, f'mmengine.{_CONSTRUCTOR}')


def say_misspelt_keys(runner: Any, cfg: Config) -> None:
    """Warn of entries of ``custom_keys`` that are in no name of a parameter, and nearly are: mmengine passes over them.

    Others are not told: configs that several models share name parts that some of them lack.

    Args:
        runner: Its model is built, unless it is a ``FlexibleRunner``.
        cfg: The config.
    """
    words = cfg.get('optim_wrapper')
    if not isinstance(runner.model, nn.Module) or not isinstance(words, Mapping) or not _is_default(words):
        return
    model = getattr(runner.model, 'module', runner.model)
    # as mmengine names them: those of the model itself begin with a dot
    names = [name if '.' in name else f'.{name}' for name, _ in model.named_parameters(remove_duplicate=False)]
    parts = {part for name in names for part in name.split('.')}
    for member in filter(_is_default, _wrappers(cfg)):
        given = member.get('paramwise_cfg')
        keys = given.get('custom_keys') if isinstance(given, Mapping) else None
        for key in map(str, keys if isinstance(keys, Mapping) else ()):
            near = difflib.get_close_matches(key, parts, n=1, cutoff=0.75)
            if near and not any(key in name for name in names):
                runner.logger.warning(
                    f'paramwise_cfg.custom_keys has {key!r} (did you mean {near[0]!r}?), which is in no name of a parameter: '
                    f'it changes nothing.'
                )
