"""What a config inherits from other OpenMMLab projects, and whether this environment has it."""

from __future__ import annotations

import ast
import dataclasses
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from ..errors import AmpConfigError
from .torchvision_ops import declare_torchvision_ops


@dataclasses.dataclass(frozen=True)
class Project:
    """What one project needs.

    Attributes:
        distribution: Its name for pip.
        oldest: The first release with mmengine models.
        newest_mmcv: The first mmcv that it refuses.
        needs_ops: Whether it imports mmcv's compiled ops.
        imports: Packages that it imports beside those of mmengine: import name to the name for pip.
    """

    distribution: str
    oldest: str = '0'
    newest_mmcv: str = ''
    needs_ops: bool = False
    imports: tuple[tuple[str, str], ...] = ()


OLDEST_MMCV = '2.0.0rc4'
PROJECTS: dict[str, Project] = {
    'mmpretrain': Project(
        'mmpretrain',
        '1.0.0',
        '2.4.0',
        imports=(
            ('torchvision', 'torchvision'),
            ('einops', 'einops'),
            ('mat4py', 'mat4py'),
            ('modelindex', 'modelindex'),
        ),
    ),
    'mmseg': Project(
        'mmsegmentation',
        '1.0.0',
        '2.2.0',
        True,
        (('ftfy', 'ftfy'), ('regex', 'regex'), ('prettytable', 'prettytable'), ('scipy', 'scipy')),
    ),
    'mmdet': Project(
        'mmdet',
        '3.0.0',
        '2.2.0',
        True,
        (
            ('pycocotools', 'pycocotools'),
            ('scipy', 'scipy'),
            ('shapely', 'shapely'),
            ('terminaltables', 'terminaltables'),
        ),
    ),
}


def inherited(config: str | Path) -> list[str]:
    """Import names of the projects whose configs a file inherits from, through its bases too.

    Args:
        config: A text config; anything that cannot be read as one inherits nothing here.
    """
    found: list[str] = []
    _collect(Path(config), found, set())
    return found


def _collect(path: Path, found: list[str], seen: set[Path]) -> None:
    path = path.resolve()
    if path in seen or not path.is_file() or path.suffix != '.py':
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_text(encoding='utf-8'))
    except (SyntaxError, UnicodeDecodeError):
        return  # mmengine will say what is wrong with it
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and any(getattr(t, 'id', '') == '_base_' for t in node.targets)):
            continue
        for constant in ast.walk(node.value):
            if not (isinstance(constant, ast.Constant) and isinstance(constant.value, str)):
                continue
            scope, separator, _ = constant.value.partition('::')
            if not separator:
                _collect(path.parent / constant.value, found, seen)
            elif scope not in found:
                found.append(scope)


def problems(project: str) -> list[str]:
    """What keeps a project from working here, one sentence each, with the remedy.

    Args:
        project: Import name; unknown ones are only looked for.
    """
    needs = PROJECTS.get(project, Project(project))
    if find_spec(project) is None:
        ops = ', and mmcv with its compiled ops in place of mmcv-lite' if needs.needs_ops else ''
        return [f'{needs.distribution} is not installed: pip install {needs.distribution}{ops}.']
    rows = []
    try:
        version = metadata.version(needs.distribution)
    except metadata.PackageNotFoundError:
        version = ''  # run from a checkout: its own import checks speak then
    if version and Version(version) < Version(needs.oldest):
        rows.append(
            f'{needs.distribution} {version} is too old, its models are not mmengine models: '
            f'pip install "{needs.distribution}>={needs.oldest}".'
        )
    missing = [pip_name for name, pip_name in needs.imports if find_spec(name) is None]
    if missing:
        rows.append(f'{needs.distribution} imports what is not installed: pip install {" ".join(missing)}.')
    return rows + (_mmcv_problems(needs) if needs.newest_mmcv else [])


def _mmcv_problems(needs: Project) -> list[str]:
    wanted = f'"mmcv>={OLDEST_MMCV},<{needs.newest_mmcv}"'
    spec = find_spec('mmcv')
    if spec is None or spec.origin is None:
        return [f'{needs.distribution} needs mmcv, which is not installed: pip install {wanted}.']
    source = (Path(spec.origin).parent / 'version.py').read_text(encoding='utf-8')
    match = re.search(r"__version__ = '([^']+)'", source)
    if match and not Version(OLDEST_MMCV) <= Version(match[1]) < Version(needs.newest_mmcv):
        return [f'{needs.distribution} does not work with mmcv {match[1]}: pip install {wanted}.']
    if needs.needs_ops and find_spec('mmcv._ext') is None:
        return [
            f'{needs.distribution} needs the compiled ops of mmcv, and this is mmcv-lite: pip uninstall mmcv-lite, then '
            f'pip install --no-build-isolation {wanted} (built from source, unless there is a wheel for your torch).'
        ]
    return []


def check(config: str | Path) -> None:
    """Refuse a config whose projects are missing, before mmengine fails in the middle of them.

    Raises:
        AmpConfigError: With every remedy.
    """
    rows = [row for project in inherited(config) for row in problems(project)]
    if rows:
        listed = rows[0] if len(rows) == 1 else '\n' + '\n'.join(f'  {row}' for row in rows)
        raise AmpConfigError([f'{config} inherits from another project: {listed}'])
    if inherited(config):
        declare_torchvision_ops()
