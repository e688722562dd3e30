"""The command ``amp-wrapper``, which pip installs; ``python -m amp_wrapper`` is the same.

Each command is a module of this folder with the name of the command (dashes become underscores). It has

* ``HELP``: one line for the overview;
* ``add_arguments(parser)``: its options, and if it likes the description and the epilog. It imports neither torch nor mmengine,
  so ``--help`` is quick;
* ``run(args)``: does the work, imports what that needs, and returns the exit status;
* and, where options have to be checked together, ``parse_args(parser, words)``.

Errors are one line on stderr. The exit status is 2 for wrong words on the command line, 1 for any other error, 130 after
Ctrl-C, and 141 where the reader of the output has gone. ``AMP_WRAPPER_DEBUG=1`` in the environment shows the traceback in
place of the line.

Commands that read a config put the current folder first on Python's import path, as ``python -m`` does, and as
``python script.py`` does with the folder of the script. So a config may import modules of the project it belongs to, wherever
pip has installed this package.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__, _register
from ..errors import AmpError, nearest

#: The name that pip installs the command under.
PROGRAM = 'amp-wrapper'
#: The commands, in the order of the overview. Those with True need all of the package, with what is registered in mmengine:
#: they read configs or checkpoints.
COMMANDS = {
    'info': False,
    'train': True,
    'test': True,
    'migrate': False,
    'convert': True,
    'report': True,
    'suggest-level': True,
    'plot': False,
    'build-ops': False,
}
#: Packages that not everybody has installed, and the words for pip.
OPTIONAL = {
    'mmengine': 'mmengine==0.10.7 "setuptools<82"',
    'mmcv': 'mmcv-lite==2.1.0',
    'pkg_resources': '"setuptools<82"',
    'setuptools': '"setuptools<82"',
    'libcst': 'libcst',
    'matplotlib': 'matplotlib',
    'jinja2': 'jinja2',
    'sklearn': 'scikit-learn',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after ``amp-wrapper``; those of the process if None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        return _quietly(lambda: _overview(words))
    name = words[0]
    prog = f'{PROGRAM} {name}'

    def fail(text: str, error: BaseException) -> int:
        print(f'{prog}: error: {text}', file=sys.stderr)
        return 1

    return _quietly(lambda: _perform(name, words[1:], prog, fail))


def script(path: str, argv: Sequence[str] | None = None) -> int:
    """Run the command that one of the scripts in ``tools`` is. Errors have the form that they have always had there.

    Args:
        path: Of the script.
        argv: Words after its name; those of the process if None.

    Returns:
        The exit status.

    Raises:
        SystemExit: With the text of an error.
    """
    name = os.path.basename(path)
    # convert_checkpoint.py, migrate_from_apex.py
    command = name.removesuffix('.py').partition('_')[0]

    def fail(text: str, error: BaseException) -> int:
        raise SystemExit(f'{type(error).__name__}: {text}' if isinstance(error, AmpError) else text) from None

    words = list(sys.argv[1:] if argv is None else argv)
    return _quietly(lambda: _perform(command, words, f'python tools/{name}', fail))


def parser_of(name: str, prog: str = '') -> tuple[ModuleType, argparse.ArgumentParser]:
    """The module of a command, and its options.

    Args:
        name: One of :data:`COMMANDS`.
        prog: How the command is called in its help; ``amp-wrapper NAME`` by default.
    """
    module = importlib.import_module(f'.{name.replace("-", "_")}', __name__)
    parser = _Parser(prog=prog or f'{PROGRAM} {name}', description=module.HELP)
    module.add_arguments(parser)
    return module, parser


class _Parser(argparse.ArgumentParser):
    """Names the option that a misspelt one may have been."""

    def error(self, message: str) -> NoReturn:
        """End with the usage and the error.

        Args:
            message: What argparse says.
        """
        words = message.partition('unrecognized arguments: ')[2].split()
        known = set(re.findall(r'--[a-z][a-z0-9_-]*', self.format_help()))
        near = next((nearest(word, known) for word in words if word.startswith('--')), '')
        super().error(message + near)


def _overview(words: list[str]) -> int:
    """Answer a command line without a command."""
    width = max(map(len, COMMANDS))
    rows = [f'  {name:<{width}}  {parser_of(name)[0].HELP}' for name in COMMANDS]
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f'{PROGRAM} [--help] [--version] COMMAND ...',
        description='Mixed-precision opt levels for mmengine and for plain torch.',
        epilog='\n'.join(['commands:', *rows, '', f'{PROGRAM} COMMAND --help tells the options of a command.']),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--version', action='version', version=f'{PROGRAM} {__version__}')
    if words and not words[0].startswith('-'):
        near = nearest(words[0], COMMANDS)
        parser.error(f'there is no command {words[0]!r}{near}. The commands: {", ".join(COMMANDS)}.')
    parser.parse_args(words)
    parser.print_help(sys.stderr)
    return 2


def _quietly(work: Callable[[], int]) -> int:
    """The exit status of some work, also where the user stops it, or the reader of the output goes, as head does."""
    try:
        try:
            return work()
        finally:
            # here, where a reader that has gone is still noticed
            sys.stdout.flush()
    except KeyboardInterrupt:
        if _debugging():
            raise
        return 130
    except BrokenPipeError:
        if _debugging():
            raise
        # nothing is flushed to it at the end of the process any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _perform(name: str, words: list[str], prog: str, fail: Callable[[str, BaseException], int]) -> int:
    """Parse and run one command; ``fail`` is called with the text of an error, and gives the exit status."""
    try:
        module, parser = parser_of(name, prog)
        args = module.parse_args(parser, words) if hasattr(module, 'parse_args') else parser.parse_args(words)
        if 'config' in args and prog.startswith(PROGRAM):
            _use_current_folder()
        if COMMANDS[name]:
            _register()
        return int(module.run(args))
    except AmpError as error:
        if _debugging():
            raise
        return fail(str(error), error)
    except ModuleNotFoundError as error:
        package = (error.name or '').partition('.')[0]
        if _debugging() or package not in OPTIONAL:
            raise
        return fail(f'this needs {package}, which is not installed: pip install {OPTIONAL[package]}', error)


def _debugging() -> bool:
    return bool(os.environ.get('AMP_WRAPPER_DEBUG'))


def _use_current_folder() -> None:
    """Let configs import the modules of the user's project."""
    folder = os.getcwd()
    if folder not in sys.path and '' not in sys.path:
        sys.path.insert(0, folder)
