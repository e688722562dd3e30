"""Runs what needs other environments than .venv, or hours; CONTRIBUTING.md says what each session takes.

What follows ``--`` goes to pytest. ``WORKERS`` is its number of processes; ``WHEELS`` a folder with a wheel of mmcv.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import nox

PYTHONS = ['3.10', '3.11', '3.12', '3.13']
TORCHES = ['2.6.0', '2.9.1', '2.11.0', '2.13.0', '2.14.1', '2.15.0']
ENGINES = ['openmmlab', 'onedl']
CONSTRAINTS = Path('constraints.txt')
PYTEST = ('python', '-m', 'pytest', '-n', os.environ.get('WORKERS', '2'), '--dist', 'worksteal')

# a bare nox lists the sessions
nox.options.sessions = []
nox.options.reuse_venv = 'yes'
nox.options.error_on_missing_interpreters = True


def install(
    session: nox.Session,
    *groups: str,
    alone: Sequence[str] = ('--group=openmmlab',),
    constraints: Path = CONSTRAINTS,
) -> None:
    """Install the package with its compiled ops, what the tests need, and groups of pyproject.toml.

    Args:
        alone: Arguments of pip for what is installed without its dependencies.
    """
    constrained = ('--constraint', str(constraints))
    session.install(*constrained, '--group=runtime', '--group=dev', *[f'--group={name}' for name in groups])
    session.install(*constrained, '--no-deps', *alone)
    session.install('--no-deps', '--no-build-isolation', '--editable=.', env={'AMP_WRAPPER_WITH_OPS': '0'})
    session.run('python', 'setup.py', 'build_ext', '--inplace', silent=True)


def other_torch(session: nox.Session, torch: str) -> Path:
    """Return constraints with another torch, or with none for the newest, and any sympy: torch 2.6 asks for its own."""
    text = re.sub(r'^(torch|sympy)==.*\n', '', CONSTRAINTS.read_text(), flags=re.M)
    path = Path(session.create_tmp(), 'constraints.txt')
    path.write_text(f'{text}torch=={torch}\n' if torch else text)
    return path


@nox.session(python=PYTHONS)
@nox.parametrize('engine', ENGINES, ids=ENGINES)
@nox.parametrize('torch', TORCHES, ids=TORCHES)
def tests(session: nox.Session, torch: str, engine: str) -> None:
    """Run the tests on another torch, Python or mmengine."""
    install(session, alone=[f'--group={engine}'], constraints=other_torch(session, torch))
    session.run(*PYTEST, *session.posargs)
    # PyPI's torch is several GB; after a failure it stays, for another try
    shutil.rmtree(session.virtualenv.location)


@nox.session(reuse_venv=False)
def canary(session: nox.Session) -> None:
    """Try the private names that the package uses on the newest torch."""
    install(session, constraints=other_torch(session, ''))
    session.run(*PYTEST, 'tests/system/test_internals.py', *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run every combination, kill and damage many trainings, and plant faults that the tests must notice."""
    install(session)
    numbers = {'KILLS': os.environ.get('KILLS', '8'), 'FILES': os.environ.get('FILES', '2500')}
    session.run(*PYTEST, '--full', *session.posargs, env=numbers)
    if not session.posargs:
        session.run('python', 'tests/system/planted_faults.py')


def other_projects(session: nox.Session, name: str) -> None:
    """Run ``tests/<folder>`` with other projects and full mmcv, which is compiled where ``WHEELS`` has none."""
    wheels = [f'--find-links={os.environ["WHEELS"]}'] if 'WHEELS' in os.environ else []
    install(session, f'{name}-runtime', alone=['--no-build-isolation', *wheels, '--group=full-mmcv', f'--group={name}'])


@nox.session
def downstream(session: nox.Session) -> None:
    """Train models of mmpretrain, mmsegmentation, mmdetection and timm."""
    other_projects(session, 'downstream')
    session.run(*PYTEST, 'tests/downstream', *session.posargs)


@nox.session
def foreign(session: nox.Session) -> None:
    """Hold optimizers, averages and models of other packages against plain FP32, and run the recipes of docs/."""
    other_projects(session, 'foreign')
    session.run(*PYTEST, 'tests/foreign_packages', *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build sdist and wheel into dist/, and ask each in an empty environment what is installed."""
    shutil.rmtree('dist', ignore_errors=True)
    session.install('--constraint=constraints.txt', 'build', '--group=build', 'torch', 'numpy')
    session.run('python', '-m', 'build', '--no-isolation', env={'AMP_WRAPPER_WITH_OPS': '1'})
    empty = Path(session.create_tmp(), 'empty').resolve()
    for file in Path('dist').resolve().iterdir():
        session.run('python', '-m', 'venv', '--clear', str(empty))
        python = str(empty / 'bin' / 'python')
        session.run(python, '-m', 'pip', 'install', '--quiet', '-c', str(CONSTRAINTS), str(file), external=True)
        with session.chdir(empty):
            session.run(str(empty / 'bin' / 'amp-wrapper'), 'info', external=True)
