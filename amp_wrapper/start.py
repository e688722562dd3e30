"""How this process was started: as one of the package's own commands, or as a program that imports the package.

The commands answer ``--help`` without torch and mmengine, so ``amp_wrapper/__init__.py`` leaves those out until somebody asks
for one of its names. The commands are ``amp-wrapper``, ``python -m amp_wrapper``, ``python -m amp_wrapper.info``, and the
scripts in the folder ``tools`` of a checkout.

Worker processes, such as those of a ``DataLoader``, are no commands, also where a command starts them: they import all of the
package, as in any other training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

#: The name that pip installs the command under.
PROGRAM = 'amp-wrapper'
#: What ``python -m`` may be given.
MODULES = ('amp_wrapper', 'amp_wrapper.info')
#: The scripts of a checkout, and the commands that they are.
SCRIPTS = {
    'train.py': 'train',
    'test.py': 'test',
    'convert_checkpoint.py': 'convert',
    'migrate_from_apex.py': 'migrate',
}
_PACKAGE = Path(__file__).resolve().parent


def command_of(argv: Sequence[str], original: Sequence[str]) -> tuple[str, ...]:
    """What of the package was started.

    Args:
        argv: ``sys.argv`` while the package is imported: ``-m`` is its first word then, if a module was named.
        original: ``sys.orig_argv``. It differs in processes that multiprocessing started, whose ``sys.argv`` is their parent's.

    Returns:
        ``('-m', module)``, or the path of the script alone; nothing where another program imports the package.
    """
    name = argv[0] if argv else ''
    if name == '-m':
        place = next((index for index, word in enumerate(original) if word == '-m'), len(original))
        module = original[place + 1] if place + 1 < len(original) else ''
        return ('-m', module) if module in MODULES else ()
    if not name or name not in original:
        return ()
    path = Path(name)
    # Windows has an .exe
    installed = path.name.removesuffix('.exe') == PROGRAM
    script = path.name in SCRIPTS and path.resolve().parent == _PACKAGE.parent / 'tools'
    return (name,) if installed or script else ()


#: What was started here; empty where another program imports the package.
COMMAND = command_of(sys.argv, sys.orig_argv)


def short(path: str | Path) -> str:
    """A path as one would type it here: relative to the current folder where it lies below."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def script() -> str:
    """The path of the script in ``tools`` that was started, or an empty string."""
    return COMMAND[0] if COMMAND and Path(COMMAND[0]).name in SCRIPTS else ''
