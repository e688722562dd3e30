"""``amp-wrapper build-ops``: compile the ops for the torch at hand, in a checkout or in an installed package."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AmpUsageError
from . import options

if TYPE_CHECKING:
    from ..ops.building import Plan

HELP = 'compile the ops for the torch that is installed'
# The build runs in a process of its own, which prints what the compilers say.
_BUILD = """
import pathlib, runpy, sys
file, root, target, objects, cuda = sys.argv[1:]
build = runpy.run_path(file)['build']
build(pathlib.Path(root), pathlib.Path(target), pathlib.Path(objects), {'yes': True, 'no': False}.get(cuda))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Compile the ops for the torch that is installed here. Needs a C++ compiler; for the CUDA ops, nvcc as well. '
        'A library that is there stays in place until the new one is complete.'
    )
    parser.epilog = f'example: {parser.prog} --jobs 4'
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        '--cuda',
        action='store_true',
        default=None,
        help='build the CUDA ops although no GPU is seen; an error where they cannot be built',
    )
    kinds.add_argument('--no-cuda', dest='cuda', action='store_false', help='leave the CUDA ops out')
    parser.add_argument('--jobs', type=options.positive, metavar='N', help='compilers at a time')
    parser.add_argument(
        '--out',
        type=Path,
        metavar='FOLDER',
        help='put the library there, and not into the package; AMP_WRAPPER_OPS=FOLDER in the environment loads it',
    )


def run(args: argparse.Namespace) -> int:
    """Build.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpUsageError: The ops cannot be built here, or the folder cannot be written to.
    """
    import torch  # noqa: F401  said by name where it is missing

    from ..ops import building, loader

    root = loader.sources_root()
    if root is None:
        raise AmpUsageError('this installation has no csrc, the sources of the ops: install the package again, by pip.')
    folder = Path(args.out).absolute() if args.out else Path(building.__file__).parent
    _check_writable(folder, is_package=args.out is None)
    # as in setup.py
    cuda = {'0': False, '1': True}.get(os.environ.get('FORCE_CUDA', '')) if args.cuda is None else args.cuda
    try:
        what = building.plan(root, cuda, '--cuda' if args.cuda else 'FORCE_CUDA=1')
    except building.BuildError as error:
        raise AmpUsageError(f'the ops cannot be built: {error}.') from None
    _announce(what, folder)
    with tempfile.TemporaryDirectory() as temporary:
        # beside setup.py, objects of earlier builds are kept
        checkout = (root / 'setup.py').is_file()
        objects = root / 'build' / building.kind(what) if checkout else Path(temporary, 'objects')
        _compile(what, Path(temporary, 'built'), objects, cuda, args.jobs)
        _install(Path(temporary, 'built', 'amp_wrapper', 'ops'), folder)
    return _what_serves(folder if args.out else None)


def _check_writable(folder: Path, is_package: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = (
            'run this as the user who installed the package, or put the library elsewhere: --out FOLDER'
            if is_package
            else 'give another --out'
        )
        raise AmpUsageError(f'{folder} cannot be written to ({error.strerror}): {remedy}.') from error


def _announce(what: Plan, folder: Path) -> None:
    facts = what.facts
    cuda = f'{facts["cuda"]}, architectures {facts["architectures"]}, {facts["nvcc"]}' if what.with_cuda else ''
    for name, value in (
        ('torch', f'{facts["torch"]}, {facts["python"]}'),
        ('compiler', facts['compiler']),
        ('CUDA', cuda or f'not built: {facts["without_cuda"]}'),
        *((('toolkit', what.toolkit.home),) if what.toolkit is not None else ()),
        ('sources', what.root / 'csrc'),
        ('library', folder),
    ):
        print(f'{name:<10}{value}')
    sys.stdout.flush()


def _compile(what: Plan, target: Path, objects: Path, cuda: bool | None, jobs: int | None) -> None:
    """Run the build, with a line for each file that is compiled; where it fails, show what the compilers said."""
    from ..ops import building

    names = building.sources(what.root, '.cpp', '.cu')
    total = len([name for name in names if what.with_cuda or '/cuda/' not in name])
    asked = {True: 'yes', False: 'no', None: 'where there is a GPU'}[cuda]
    words = [building.__file__, str(what.root), str(target), str(objects), asked]
    environment = {**os.environ, 'PYTHONUNBUFFERED': '1', **({'MAX_JOBS': str(jobs)} if jobs else {})}
    said: list[str] = []
    seen: set[str] = set()
    command = [sys.executable, '-c', _BUILD, *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace'
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found = re.search(r' -c \S*?(csrc/\S+\.(?:cpp|cu))\b', line)
            if found and found[1] not in seen:
                seen.add(found[1])
                print(f'[{len(seen)}/{total}] {found[1]}', flush=True)
    if process.returncode:
        # with ninja: from the first file that failed
        start = next((index for index, line in enumerate(said) if line.startswith('FAILED')), 0)
        sys.stderr.writelines(line for line in said[start:] if not line.startswith(('  File', 'Traceback')))
        raise AmpUsageError(
            'the ops could not be compiled; the messages of the compiler are above. The library that was there is unchanged.'
        )
    if not seen:
        print('nothing to compile: all objects are up to date', flush=True)


def _install(built: Path, folder: Path) -> None:
    """Put library and record into their folder; processes that have the old library keep it."""
    from ..ops import building

    library = next(built.glob('_C*'))
    building.write_record(folder, built=False, reason='a build was begun and not finished', chosen=False)
    for name in (library.name, building.RECORD):
        new = folder / f'{name}.new'
        shutil.copyfile(built / name, new)
        os.replace(new, folder / name)


def _what_serves(folder: Path | None) -> int:
    """Say what serves the ops now, as a new process finds it."""
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)}
    if folder is not None:
        environment['AMP_WRAPPER_OPS'] = str(folder)
    command = [sys.executable, '-m', 'amp_wrapper.info', '--json']
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AmpUsageError(f'the library was built, and cannot be used: {done.stderr.strip().splitlines()[-1]}')
    facts: dict[str, Any] = json.loads(done.stdout)
    build = facts['build']
    for device in ('cpu', 'cuda'):
        served = [row[device] for row in facts['ops'].values()]
        count = sum(one != 'reference' for one in served)
        why = f' ({build["reason"]})' if build['reason'] and not count else ''
        print(f'{device.upper():<10}{count} of {len(served)} ops are compiled{why}')
    if not build['loaded'] and os.environ.get('AMP_WRAPPER_OPS') != 'reference':
        raise AmpUsageError(f'the library was built, and is not loaded, since {build["reason"]}.')
    if folder is not None:
        print(f'To load it: AMP_WRAPPER_OPS={folder} in the environment')
    return 0
