"""What the commands say about other OpenMMLab projects: missing, too old, without ops."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import tool
from grid import but

from amp_wrapper.openmmlab import projects, torchvision_ops

ROOT = Path(__file__).resolve().parents[2]
MMDET = ('mmdet', 'pycocotools', 'scipy', 'shapely', 'terminaltables')
CONFIGS = sorted((ROOT / 'configs').glob('mm*/*.py'))


def test_every_config_of_another_project_is_recognised() -> None:
    assert len(CONFIGS) == 23
    for path in CONFIGS:
        assert projects.inherited(path) == [path.parent.name], path
        text = path.read_text()
        assert len(text.splitlines()) <= 10 and f"opt_level='{path.stem[-2:].upper()}'" in text
    for path in (ROOT / 'configs').glob('digits/*.py'):
        assert projects.inherited(path) == []


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ("_base_ = ['./other.py', 'mmdet::a.py']", ['mmseg', 'mmdet']),
        ("_base_ = ['mmdet::a.py', 'mmdet::b.py']", ['mmdet']),
        ("_base_ = './itself.py'", []),
        ("_base_ = './gone.py'", []),
        ("x = 'mmdet::a.py'", []),
        ('_base_ = (', []),
        ('with read_base():\n    from .._base_ import *', []),
    ],
)
def test_inherited(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / 'other.py').write_text("_base_ = 'mmseg::b.py'")
    (tmp_path / 'itself.py').write_text("_base_ = ['./itself.py']")
    (tmp_path / 'config.py').write_text(text)
    assert projects.inherited(tmp_path / 'config.py') == expected


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    present: tuple[str, ...],
    version: str = '3.3.0',
    mmcv: str = '2.1.0',
) -> None:
    """An environment with some packages in it."""
    (tmp_path / 'version.py').write_text(f"__version__ = '{mmcv}'\n")
    spec = SimpleNamespace(origin=str(tmp_path / '__init__.py'))
    for module in (projects, torchvision_ops):
        monkeypatch.setattr(module, 'find_spec', lambda name: spec if name in present else None)

    def installed(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(projects.metadata, 'version', installed)


@pytest.mark.parametrize(
    ('present', 'options', 'words'),
    [
        ((), {}, ['mmdet is not installed', 'compiled ops']),
        ((*MMDET, 'mmcv', 'mmcv._ext'), {}, []),
        ((*MMDET, 'mmcv', 'mmcv._ext'), {'version': ''}, []),
        ((*MMDET, 'mmcv', 'mmcv._ext'), {'version': '2.28.2'}, ['mmdet 2.28.2 is too old', '"mmdet>=3.0.0"']),
        ((*MMDET, 'mmcv'), {}, ['this is mmcv-lite', 'pip uninstall mmcv-lite', '"mmcv>=2.0.0rc4,<2.2.0"']),
        (
            (*MMDET, 'mmcv', 'mmcv._ext'),
            {'mmcv': '2.2.0'},
            ['does not work with mmcv 2.2.0', '"mmcv>=2.0.0rc4,<2.2.0"'],
        ),
        ((*MMDET, 'mmcv', 'mmcv._ext'), {'mmcv': '1.7.2'}, ['does not work with mmcv 1.7.2']),
        (('mmdet', 'mmcv', 'mmcv._ext', 'scipy'), {}, ['pip install pycocotools shapely terminaltables']),
        (MMDET, {}, ['needs mmcv, which is not installed']),
    ],
)
def test_problems(
    present: tuple[str, ...], options: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, present, **options)
    rows = projects.problems('mmdet')
    assert len(rows) == bool(words) and all(word in rows[0] for word in words), rows


def test_projects_that_need_no_ops_take_mmcv_lite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = [name for project in ('mmseg', 'mmpretrain') for name, _ in projects.PROJECTS[project].imports]
    pretend(monkeypatch, tmp_path, ('mmseg', 'mmpretrain', 'mmcv', *others), version='1.2.2')
    assert projects.problems('mmpretrain') == []
    # mmsegmentation 1.2.2 imports mmcv.ops when it is imported itself
    assert 'mmcv-lite' in projects.problems('mmseg')[0]


@pytest.mark.skipif(util.find_spec('mmdet') is not None, reason='mmdet is installed')
@pytest.mark.parametrize('name', but(['tools/train.py'], ['tools/train.py', 'tools/test.py']))
def test_tools_stop_before_anything_is_built(name: str) -> None:
    words = [name, 'configs/mmdet/retinanet_r50_fpn_1x_coco_o2.py']
    said = tool(*words, *(['README.md'] if 'test' in name else []), ok=False)
    assert 'inherits from another project' in said and 'pip install mmdet' in said and 'Traceback' not in said


@pytest.mark.parametrize(
    ('version', 'cuda', 'declared'),
    [
        ('0.28.0+cu130', None, True),
        ('0.28.0+cpu', None, False),
        ('0.28.0', None, False),
        ('0.28.0+cu130', '13.0', False),
    ],
)
def test_torchvision_of_another_build(
    version: str, cuda: str | None, declared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    library = SimpleNamespace(define=made.append)
    pretend(monkeypatch, tmp_path, ('torchvision',), mmcv=version)
    monkeypatch.setattr(torchvision_ops, '_torchvision', None)
    monkeypatch.setattr(torch.version, 'cuda', cuda)
    monkeypatch.setattr(torch.library, 'Library', lambda *names: library)
    torchvision_ops.declare_torchvision_ops()
    torchvision_ops.declare_torchvision_ops()
    assert len(made) == (2 if declared else 0)
