#!/usr/bin/env python
"""Builds wheels: one in pure Python for every machine, and one with compiled ops for each torch, Python and kind of device.

All come from one source distribution. Each torch is installed in an environment of its own, which is
removed again. What cannot be built here is listed with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interpreters import find_interpreter, in_order

ROOT = Path(__file__).resolve().parents[1]
PURE = 'py3-none-any'
# What the torch of an environment is, and whether a toolkit for it is here; by the file that the build asks, too.
LOOK = """
import json, platform, runpy, sys
import torch
from torch.utils.cpp_extension import CUDA_HOME
missing = ''
if torch.version.cuda:
    toolkit, missing = runpy.run_path(sys.argv[1])['find_toolkit'](CUDA_HOME, torch.version.cuda)
print(json.dumps(dict(torch=torch.__version__, cuda=torch.version.cuda, missing=missing)))
"""
# A few ops of an installed wheel: their results, bit for bit, and what served them.
TRY = """
import json, torch
from amp_wrapper import ops
from amp_wrapper.ops import loader
torch.manual_seed(0)
sources = [torch.randn(n).to(dtype) for n in (1, 7, 1000) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
targets = [torch.empty(source.shape) for source in sources]
found_inf = torch.zeros(())
ops.multi_tensor_scale(sources, targets, torch.tensor(0.3), found_inf)
norm, each = ops.multi_tensor_l2norm(sources, per_tensor=True)
weights = [torch.zeros(target.shape, dtype=torch.bfloat16) for target in targets]
ops.multi_tensor_copy(targets, weights)
bits = [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in (*targets, *weights, norm, each)]
facts = loader.library()
print(json.dumps(dict(bits=bits, devices=sorted(facts.devices), reason=facts.reason, torch=torch.__version__)))
"""


class BuildFailed(Exception):
    """A wheel that should have been built could not be, or does not do what it should."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """A Python and a torch, as they were asked for.

    Attributes:
        python: Such as '3.12'.
        torch: Such as '2.13.0'.
    """

    python: str
    torch: str


@dataclasses.dataclass
class Outcome:
    """What has become of it all.

    Attributes:
        built: Name of each wheel, with what it was tried on.
        left_out: What was not built, with the reason.
        failed: What should have been built and was not, with the reason.
    """

    built: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def local_version(torch: str, cuda: str | None) -> str:
    """The end of a wheel's version: what its library was built for.

    Args:
        torch: The version of torch.
        cuda: The version of CUDA; None for a library that serves the CPU alone.

    Returns:
        Such as 'torch2.13cpu', 'torch2.11cu130'. torch keeps its binary interface within a minor release.
    """
    major, minor = torch.split('+')[0].split('.')[:2]
    return f'torch{major}.{minor}' + (f'cu{cuda.replace(".", "")}' if cuda else 'cpu')


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a program without the variables that would lead it elsewhere.

    Returns:
        What it printed.

    Raises:
        BuildFailed: With the last lines that it printed.
    """
    kept = {key: value for key, value in os.environ.items() if key not in ('PYTHONPATH', 'AMP_WRAPPER_OPS')}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise BuildFailed('\n'.join(['', *(f'    {line}' for line in said[-30:])]))
    return done.stdout


def pip(python: Path, *words: str | Path, **variables: str) -> str:
    """Run pip for an interpreter; see :func:`run`."""
    return run(python, '-m', 'pip', '--disable-pip-version-check', *words, **variables)


def source_distribution(work: Path) -> Path:
    """Pack this checkout, and unpack it.

    Returns:
        The folder that all wheels are built from.
    """
    run(sys.executable, 'setup.py', '-q', 'sdist', '-d', work, cwd=ROOT, AMP_WRAPPER_WITH_OPS='0')
    archive = next(work.glob('*.tar.gz'))
    with tarfile.open(archive) as content:
        # Python 3.11.3 and 3.10.11 have no filters yet
        safely: Any = dict(filter='data') if hasattr(tarfile, 'data_filter') else {}
        content.extractall(work, **safely)
    return work / archive.name.removesuffix('.tar.gz')


def new_wheel(before: set[Path], folder: Path) -> Path:
    """The wheel that was added to a folder."""
    (found,) = set(folder.glob('*.whl')) - before
    return found


def build_pure(sources: Path, out: Path) -> Path:
    """The wheel without ops: by an isolated build, which sees no torch, as pip does it where it installs the sources."""
    with_name = set(out.glob('*.whl'))
    for old in out.glob(f'*-{PURE}.whl'):
        old.unlink()
        with_name.discard(old)
    pip(Path(sys.executable), 'wheel', '-q', '--no-deps', '--no-cache-dir', '-w', out, sources)
    wheel = new_wheel(with_name, out)
    if not wheel.name.endswith(f'-{PURE}.whl'):
        raise BuildFailed(f'{wheel.name} is no {PURE}: this build saw a torch')
    return wheel


def environment(work: Path, wanted: Combination, python: Path) -> Path:
    """An environment with the torch; returns its interpreter.

    Raises:
        LookupError: pip has no such torch for this Python.
    """
    folder = work / f'env-{wanted.python}-{wanted.torch}'
    shutil.rmtree(folder, ignore_errors=True)
    run(python, '-m', 'venv', folder)
    inside = folder / 'bin' / 'python'
    try:
        pip(
            inside,
            'install',
            '-q',
            '-r',
            ROOT / 'requirements' / 'build.txt',
            f'torch=={wanted.torch}',
            'numpy',
            'jinja2',
        )
    except BuildFailed as error:
        if 'No matching distribution found for torch' in str(error):
            raise LookupError(f'pip has no torch {wanted.torch} for Python {wanted.python} on this platform') from None
        raise
    return inside


def build_one(sources: Path, out: Path, inside: Path, torch: str, cuda: str | None) -> tuple[Path, str]:
    """Build a wheel with ops in an environment, and try it there.

    Returns:
        The wheel, and the words about the trial.
    """
    word = local_version(torch, cuda)
    tag = run(inside, '-c', 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")').strip()
    for old in out.glob(f'*+{word}-{tag}-*.whl'):
        old.unlink()
    before = set(out.glob('*.whl'))
    variables = {
        'AMP_WRAPPER_WITH_OPS': '1',
        'FORCE_CUDA': '1' if cuda else '0',
        'AMP_WRAPPER_LOCAL_VERSION': word,
    }
    pip(inside, 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-cache-dir', '-w', out, sources, **variables)
    wheel = new_wheel(before, out)
    if f'+{word}-{tag}-' not in wheel.name:
        raise BuildFailed(f'{wheel.name} does not say {word}')
    pip(inside, 'install', '-q', '--no-deps', '--force-reinstall', wheel)
    facts, reference = (
        json.loads(run(inside, '-W', 'ignore', '-c', TRY, cwd=out, AMP_WRAPPER_OPS=chosen))
        for chosen in ('', 'reference')
    )
    if facts['devices'] != (['cpu', 'cuda'] if cuda else ['cpu']):
        raise BuildFailed(f'{wheel.name} serves {facts["devices"]}: {facts["reason"]}')
    if facts['bits'] != reference['bits']:
        raise BuildFailed(f'{wheel.name} computes other bits than the reference')
    return wheel, f'tried on torch {facts["torch"]}: three ops on a CPU give the bits of the reference'


def build_all(wanted: Sequence[Combination], out: Path, work: Path, keep: bool) -> Outcome:
    """Build, and say what is done.

    Args:
        wanted: Which wheels with ops.
        out: Gets the wheels.
        work: For what is needed on the way.
        keep: Whether environments stay there.
    """
    outcome = Outcome()
    total = 1 + len(wanted)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    say(f'[1/{total}] {PURE}: from a source distribution, in an isolated build')
    sources = source_distribution(work)
    wheel = build_pure(sources, out)
    outcome.built[wheel.name] = 'for every torch; amp-wrapper build-ops adds the ops'
    for index, one in enumerate(wanted, 2):
        name = f'Python {one.python}, torch {one.torch}'
        python = find_interpreter(one.python)
        if python is None:
            outcome.left_out[name] = f'there is no interpreter python{one.python}, neither in the path nor of pyenv'
            say(f'[{index}/{total}] {name}: left out, {outcome.left_out[name]}')
            continue
        say(f'[{index}/{total}] {name}: installing it')
        try:
            inside = environment(work, one, python)
            _build_kinds(sources, out, inside, name, f'[{index}/{total}]', outcome)
        except LookupError as error:
            outcome.left_out[name] = str(error)
            say(f'[{index}/{total}] {name}: left out, {error}')
        except BuildFailed as error:
            outcome.failed[name] = str(error)
            say(f'[{index}/{total}] {name}: failed{error}')
        if not keep:
            shutil.rmtree(work / f'env-{one.python}-{one.torch}', ignore_errors=True)
    return outcome


def _build_kinds(sources: Path, out: Path, inside: Path, name: str, step: str, outcome: Outcome) -> None:
    """The wheel for the CPU, and that for CUDA where torch and this machine have it."""
    facts = json.loads(run(inside, '-W', 'ignore', '-c', LOOK, ROOT / 'amp_wrapper' / 'ops' / 'cuda_toolkit.py'))
    kinds: list[str | None] = [None]
    if facts['cuda'] is None:
        outcome.left_out[f'{name}, CUDA'] = f'torch {facts["torch"]} has no CUDA'
    elif facts['missing']:
        outcome.left_out[f'{name}, CUDA'] = facts['missing']
    else:
        kinds.append(facts['cuda'])
    for cuda in kinds:
        kind = f'CUDA {cuda}' if cuda else 'CPU'
        say(f'{step} {name}: compiling for {kind}')
        began = time.monotonic()
        try:
            wheel, words = build_one(sources, out, inside, facts['torch'], cuda)
        except BuildFailed as error:
            outcome.failed[f'{name}, {kind}'] = str(error)
            say(f'{step} {name}: {kind} failed{error}')
            continue
        outcome.built[wheel.name] = words
        say(f'{step} {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s; {words}')


def summary(outcome: Outcome) -> str:
    """What there is now, what is left out, and what has failed."""
    lines = [f'built: {len(outcome.built)}']
    lines += [f'  {name}: {words}' for name, words in outcome.built.items()]
    for title, rows in (('left out', outcome.left_out), ('failed', outcome.failed)):
        lines += [f'{title}: {len(rows)}'] if rows else []
        # of a compiler's messages the last line alone; all of them were printed
        lines += [f'  {name}: {reason.strip().splitlines()[-1].strip()}' for name, reason in rows.items()]
    return '\n'.join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    pinned = re.search(r'^torch==(\S+)', (ROOT / 'requirements' / 'runtime.txt').read_text(), re.MULTILINE)
    assert pinned is not None
    parser.add_argument('--python', nargs='*', default=['3.10', '3.11', '3.12', '3.13'], metavar='X.Y')
    parser.add_argument('--torch', nargs='*', default=['2.11.0', pinned[1]], metavar='X.Y.Z')
    parser.add_argument('--out', type=Path, default=ROOT / 'dist', metavar='FOLDER', help='gets the wheels (dist)')
    parser.add_argument(
        '--work', type=Path, default=ROOT / 'build' / 'wheels', metavar='FOLDER', help='for environments'
    )
    parser.add_argument('--keep', action='store_true', help='keep the environments, several GB each')
    parser.add_argument('--dry', action='store_true', help='say what would be built')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; 1 where something failed."""
    args = parse(arguments)
    pairs = [
        (python, torch) for torch in sorted(args.torch, key=in_order) for python in sorted(args.python, key=in_order)
    ]
    wanted = [Combination(python, torch) for python, torch in pairs]
    if args.dry:
        say(PURE)
        for one in wanted:
            here = find_interpreter(one.python)
            say(
                f'Python {one.python}, torch {one.torch}: '
                + (f'by {here}' if here else 'left out, there is no interpreter')
            )
        return 0
    outcome = build_all(wanted, args.out.absolute(), args.work.absolute(), args.keep)
    say(summary(outcome))
    return 1 if outcome.failed else 0


if __name__ == '__main__':
    sys.exit(main())
