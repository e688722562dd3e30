"""Configs as commands read them: from a file, with what ``--cfg-options`` says, and errors that say what is wrong in a line."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.runner import FlexibleRunner, Runner

from ..errors import AmpConfigError, AmpUsageError, nearest
from . import projects

#: What mmengine reads from a config beside the arguments of its runners: in methods of theirs, and where it reads the file.
_READ_FROM_CFG = (
    'activation_checkpointing',
    'compile',
    'custom_imports',
    'data_root',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'init_weights_for_test_or_val',
    'model_wrapper_cfg',
    'runner_type',
    'sync_bn',
)
#: How close a key must be to a known one to be taken for a misspelling of it: 'val_dataloder' is, 'val_pipeline' is not close
#: to 'train_pipeline'.
_NEAR = 0.8


def read_config(path: str | Path, options: dict[str, Any] | None = None) -> Config:
    """Read a config file.

    Args:
        path: Of a text config or a pure Python one.
        options: Entries to override, by dotted keys, as :func:`parse_options` gives them.

    Raises:
        AmpUsageError: There is no such file.
        AmpConfigError: It is no config, imports what cannot be imported, or inherits from a project that is not installed.
    """
    path = Path(path)
    if not path.is_file():
        ending = path.suffix or '.py'
        files = path.parent.iterdir() if path.parent.is_dir() else ()
        beside = [file.stem for file in files if file.suffix == ending]
        raise AmpUsageError(f'the config {str(path)!r} is no file{nearest(path.stem, beside, ending)}.')
    projects.check(path)
    try:
        cfg = Config.fromfile(path)
    except ImportError as error:
        raise AmpConfigError(
            [
                f'{path} imports what cannot be imported: {_first(error)}. Modules are looked for among those that are '
                'installed, in PYTHONPATH and in the current folder.'
            ]
        ) from error
    except SyntaxError as error:
        # mmengine names no file where it is a base of this one
        place = f'line {error.lineno}' if _has_mistake(path) else 'in a config that it inherits from'
        raise AmpConfigError([f'{path} cannot be read as a config: {place}: {error.msg}.']) from error
    except Exception as error:
        # a config is a program, so it may raise anything
        text = str(error).strip().replace('\n', ' ')
        raise AmpConfigError([f'{path} cannot be read as a config: {type(error).__name__}: {text}']) from error
    merge_options(cfg, options)
    return cfg


def _first(error: BaseException) -> BaseException:
    """The error that led to this one; mmengine's own names the module of the config alone, and not what that misses."""
    cause = error.__cause__ or error.__context__
    return _first(cause) if isinstance(cause, ImportError) else error


def _has_mistake(path: Path) -> bool:
    """Whether it is this file that is no Python."""
    try:
        ast.parse(path.read_text(encoding='utf-8'))
    except SyntaxError:
        return True
    return False


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """What ``--cfg-options KEY=VALUE ...`` means, as mmengine reads it.

    Args:
        words: Each ``KEY=VALUE``; lists are written ``a,b`` or ``"[a,b]"``.

    Raises:
        ValueError: One of them has no ``=``, or brackets that do not match.
    """
    for word in words:
        if '=' not in word:
            raise ValueError(f'{word!r} is no KEY=VALUE')
    found = argparse.Namespace(options=None)
    try:
        DictAction(['--cfg-options'], 'options')(argparse.ArgumentParser(), found, list(words))
    except AssertionError as error:
        raise ValueError(str(error)) from None
    return dict(found.options)


def merge_options(cfg: Config, options: dict[str, Any] | None) -> None:
    """Put the command line's entries into the config; ``data_root=PATH`` moves every data set below the old root.

    Args:
        cfg: Changed in place.
        options: From ``--cfg-options``, or None.

    Raises:
        AmpConfigError: They do not fit the config; a key that neither the config nor mmengine knows, and that is close to one
            that they know.
    """
    if not options:
        return
    _check_keys(cfg, options)
    new = options.get('data_root')
    if new is not None:
        _move_data(cfg, str(new))
    try:
        cfg.merge_from_dict(options)
    except (KeyError, TypeError, IndexError) as error:
        raise AmpConfigError([f'--cfg-options do not fit the config: {type(error).__name__}: {error}']) from error


def _check_keys(cfg: Config, options: dict[str, Any]) -> None:
    """Refuse keys that are misspelt; of others that nobody is known to read, say so.

    A new key at the top of a config is no error for mmengine, which never looks at it. It is legitimate where code of the
    user's project reads ``runner.cfg``, so only a key that is close to a known one is refused.
    """
    known = [*cfg, *known_keys()]
    for option in options:
        key = option.partition('.')[0]
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
        if near:
            raise AmpConfigError(
                [
                    f"--cfg-options {option}: neither the config nor mmengine knows {key!r} (did you mean '{near[0]}'?). A key "
                    'that your own code reads can be written into the config.'
                ]
            )
        if os.environ.get('RANK', '0') == '0':
            print(
                f'warning: --cfg-options {option}: neither the config nor mmengine knows {key!r}; it has an effect only where '
                'code of your own reads it.',
                file=sys.stderr,
            )


@contextmanager
def nested_keys(cfg: Config, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Around what builds from a config: an entry of it that a class does not take is an error of one line.

    Only mmengine's own calls count: for an entry of the command line all of them, for others those that build an object. An
    argument that code of the user's project hands on is that code's error, with its traceback, and so is one that is no key of
    the config.

    Args:
        cfg: With the options in it; not changed.
        options: From ``--cfg-options``, or None.

    Raises:
        AmpConfigError: Names the entry, what refused it, and the nearest ones that there are.
    """
    beside = {option: _beside(cfg.to_dict(), option.split('.')) for option in options or {}}
    try:
        yield
    except TypeError as error:
        found = _REFUSED.search(str(error))
        frame = last_frame(error)
        if found is None or frame is None or not frame.f_globals.get('__name__', '').startswith('mmengine.'):
            raise
        key = found['key']
        what = found['name'] + (found['method'] or '').replace('.__init__', '')
        known = _taken(found['name'], frame)
        option = next((each for each in beside if key in each.split('.')[1:]), None)
        if option is not None:
            parts = option.split('.')
            entry = '.'.join(parts[: parts.index(key, 1) + 1])
            known += [name for name in beside[option].get(entry, ()) if name != key]
        elif frame.f_code.co_name != 'build_from_cfg' or not _has_key(cfg.to_dict(), key):
            raise
        place = 'the config' if option is None else f'--cfg-options {option}'
        problem = f'{place}: {what} takes no {key!r}{nearest(key, dict.fromkeys(known))}.'
        raise AmpConfigError([problem]) from error


_REFUSED = re.compile(r"(?P<name>\w+)(?P<method>\.\w+)?\(\) got an unexpected keyword argument '(?P<key>\w+)'")


def _has_key(node: Any, key: str) -> bool:
    if isinstance(node, Mapping):
        return key in node or any(_has_key(value, key) for value in node.values())
    return isinstance(node, (list, tuple)) and any(_has_key(value, key) for value in node)


def _beside(cfg: Any, parts: Sequence[str]) -> dict[str, list[str]]:
    """Each dotted entry that an option passes through, with the keys of the dict that it is in."""
    found = {}
    for index, part in enumerate(parts):
        if isinstance(cfg, Mapping):
            found['.'.join(parts[: index + 1])] = [str(key) for key in cfg]
            cfg = cfg.get(part)
        else:
            cfg = cfg[int(part)] if isinstance(cfg, (list, tuple)) and part.isdigit() and int(part) < len(cfg) else None
    return found


def last_frame(error: BaseException) -> FrameType | None:
    """The one that made the call: a call with an argument too many has no frame of its own."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return None if place is None else place.tb_frame


def _taken(name: str, frame: FrameType) -> list[str]:
    """The arguments of the class of a name that a frame holds, and of a class in it that hands its arguments on."""
    held = [*frame.f_locals.values(), frame.f_globals.get(name)]
    classes = [each for each in held if isinstance(each, type) and name in {base.__name__ for base in each.__mro__}]
    return [
        parameter.name
        for each in classes
        for base in each.__mro__[:-1]
        if '__init__' in vars(base)
        for parameter in inspect.signature(vars(base)['__init__']).parameters.values()
        if parameter.name != 'self' and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


@functools.cache
def known_keys() -> tuple[str, ...]:
    """What mmengine's runners, and the commands, read at the top of a config."""
    arguments = {
        name: None
        for runner in (Runner, FlexibleRunner)
        for name, parameter in inspect.signature(runner.__init__).parameters.items()
        if name not in ('self', 'cfg')
    }
    return (*arguments, *_READ_FROM_CFG)


def _move_data(cfg: Config, new: str) -> None:
    """Replace the folder that the config's data lie in, wherever it is written: data sets inside others, annotations."""
    old = cfg.get('data_root')
    if old is None:
        # mmpretrain writes it into the data sets alone
        old = next(
            (dataset['data_root'] for dataset in _datasets(cfg.get('train_dataloader')) if 'data_root' in dataset), None
        )
    if old is None:
        raise AmpConfigError(
            ['data_root=PATH: the config names no data_root; give the entries of its data sets one by one.']
        )
    for key in list(cfg):
        if key.endswith(('_dataloader', '_evaluator')) and cfg[key] is not None:
            cfg[key] = _moved(cfg[key], str(old).rstrip('/'), new.rstrip('/'))


def _datasets(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if 'data_root' in node:
            yield node
        for value in node.values():
            yield from _datasets(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _datasets(value)


def _moved(node: Any, old: str, new: str) -> Any:
    if isinstance(node, dict):
        for key in list(node):
            node[key] = _moved(node[key], old, new)
        return node
    if isinstance(node, (list, tuple)):
        return type(node)(_moved(value, old, new) for value in node)
    if isinstance(node, str) and (node == old or node.startswith(f'{old}/')):
        return new + node[len(old) :]
    return node
