"""What a config inherits from other OpenMMLab projects, and whether this environment has it."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version

# import name: (distribution, oldest release on mmengine, first mmcv that it refuses, whether it needs mmcv's ops)
PROJECTS: dict[str, tuple[str, str, str, bool]] = {
    'mmpretrain': ('mmpretrain', '1.0.0', '2.4.0', False),
    'mmseg': ('mmsegmentation', '1.0.0', '2.2.0', True),
    'mmdet': ('mmdet', '3.0.0', '2.2.0', True),
}
_SCHEMAS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)
_torchvision: torch.library.Library | None = None


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
    distribution, oldest, newest_mmcv, needs_ops = PROJECTS.get(project, (project, '0', '', False))
    if find_spec(project) is None:
        ops = ', and mmcv with its compiled ops in place of mmcv-lite' if needs_ops else ''
        return [f'{distribution} is not installed: pip install {distribution}{ops}.']
    rows = []
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = ''  # run from a checkout: its own import checks speak then
    if version and Version(version) < Version(oldest):
        rows.append(
            f'{distribution} {version} is too old, its models are not mmengine models: pip install "{distribution}>={oldest}".'
        )
    rows += _mmcv_problems(distribution, newest_mmcv, needs_ops)
    return rows


def _mmcv_problems(distribution: str, newest: str, needs_ops: bool) -> list[str]:
    if find_spec('mmcv') is None:
        return [f'{distribution} needs mmcv, which is not installed: pip install "mmcv<{newest}".'] if newest else []
    source = (Path(find_spec('mmcv').origin or '').parent / 'version.py').read_text(encoding='utf-8')  # type: ignore[union-attr]
    match = re.search(r"__version__ = '([^']+)'", source)
    rows = []
    if newest and match and Version(match[1]) >= Version(newest):
        rows.append(f'{distribution} refuses mmcv {match[1]}: pip install "mmcv<{newest}".')
    if needs_ops and find_spec('mmcv._ext') is None:
        rows.append(
            f'{distribution} needs the compiled ops of mmcv, and this is mmcv-lite: pip uninstall mmcv-lite, then '
            f'pip install --no-build-isolation "mmcv<{newest}" (built from source, unless there is a wheel for your torch).'
        )
    return rows


def check(config: str | Path) -> None:
    """Refuse a config whose projects are missing, before mmengine fails in the middle of them.

    Raises:
        SystemExit: With every remedy.
    """
    rows = [row for project in inherited(config) for row in problems(project)]
    if rows:
        raise SystemExit(f'{config} inherits from another project:\n' + '\n'.join(f'  {row}' for row in rows))
    if inherited(config):
        declare_torchvision_ops()


def declare_torchvision_ops() -> None:
    """Let a CUDA build of torchvision be imported beside a CPU torch, as a plain ``pip install`` brings it.

    Its Python part needs the schemas of two operators that its library, which cannot be loaded there, would declare.
    The operators themselves stay absent. Does nothing where the two builds fit.
    """
    global _torchvision
    spec = find_spec('torchvision')
    if _torchvision is not None or torch.version.cuda is not None or spec is None or spec.origin is None:
        return
    if '+cu' in (Path(spec.origin).parent / 'version.py').read_text(encoding='utf-8'):
        _torchvision = torch.library.Library('torchvision', 'FRAGMENT')
        for schema in _SCHEMAS:
            _torchvision.define(schema)
