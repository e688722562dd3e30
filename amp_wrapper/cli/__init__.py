"""The command ``amp-wrapper``, which pip installs; ``python -m amp_wrapper`` is the same.

``commands.py`` has the table of commands. Errors are one line on stderr. The exit status is 2 for wrong words on the command
line, 1 for any other error, 130 after Ctrl-C, and 141 where the reader of the output has gone. ``AMP_WRAPPER_DEBUG=1`` in the
environment shows the traceback in place of the line.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import AmpError, nearest
from .commands import COMMANDS, PROGRAM, Parser

#: Packages that not everybody has installed, and the words for pip.
OPTIONAL = {
    'mmengine': 'mmengine==0.10.7 "setuptools<82"',
    'mmcv': 'mmcv-lite==2.1.0',
    'pkg_resources': '"setuptools<82"',
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
    try:
        try:
            return _run(words[0], words[1:]) if words and words[0] in COMMANDS else _overview(words)
        finally:
            # here, where a reader that has gone is still noticed
            sys.stdout.flush()
    except (AmpError, ModuleNotFoundError, KeyboardInterrupt, BrokenPipeError) as error:
        package = (getattr(error, 'name', None) or '').partition('.')[0]
        is_defect = isinstance(error, ModuleNotFoundError) and package not in OPTIONAL
        if os.environ.get('AMP_WRAPPER_DEBUG') or is_defect:
            raise
        if isinstance(error, KeyboardInterrupt):
            return 130
        if isinstance(error, BrokenPipeError):
            # nothing is flushed to it at the end of the process any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        missing = f'this needs {package}, which is not installed: pip install {OPTIONAL.get(package)}'
        print(f'{PROGRAM} {words[0]}: error: {missing if package in OPTIONAL else error}', file=sys.stderr)
        return 1


def _run(name: str, words: list[str]) -> int:
    """Parse the words behind a command, and call the function that does its work."""
    parser = COMMANDS[name]
    # positional arguments may stand between options
    args = parser.parse_intermixed_args(words)
    if 'local_rank' in args:
        # where mmengine looks for it
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    if 'config' in args and not {'', os.getcwd()} & set(sys.path):
        # a config may import modules of the project that it belongs to
        sys.path.insert(0, os.getcwd())
    try:
        work = getattr(import_module(args.module, __name__), name.replace('-', '_'))
        return int(work(args) or 0)
    except ArgumentError as error:
        parser.error(str(error))


def _overview(words: list[str]) -> int:
    """Answer a command line without a command."""
    rows = [f'  {name:<{max(map(len, COMMANDS))}}  {parser.description}' for name, parser in COMMANDS.items()]
    parser = Parser(
        prog=PROGRAM,
        usage=f'{PROGRAM} [--help] [--version] COMMAND ...',
        description='Mixed-precision opt levels for mmengine and for plain torch.',
        epilog='\n'.join(['commands:', *rows, '', f'{PROGRAM} COMMAND --help tells the options of a command.']),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument('--version', action='version', version=f'{PROGRAM} {__version__}')
    if words and not words[0].startswith('-'):
        near = nearest(words[0], COMMANDS)
        parser.error(f'there is no command {words[0]!r}{near}. The commands: {", ".join(COMMANDS)}.')
    parser.parse_args(words)
    parser.print_help(sys.stderr)
    return 2
