"""tools/convert_checkpoint.py: inspects, converts, publishes, and says in a line what is wrong."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import differences
from command_line import python
from foreign_files import FOREIGN, KINDS, POSITION, ROOT, SCALES, losses_file, read
from grid import but_every

from amp_wrapper.checkpoint import convert, describe
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.checkpoint.newest import find_newest
from amp_wrapper.cli import convert as options
from amp_wrapper.cli import script

# -- the tool ---------------------------------------------------------------------------------------------------------


class TOOL:
    """``python tools/convert_checkpoint.py``, in this process."""

    TARGETS, KINDS = options.TARGETS, describe.KINDS

    @staticmethod
    def main(words: list[str]) -> None:
        assert script('tools/convert_checkpoint.py', words) == 0


def inspected(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    TOOL.main([str(path), '--inspect'])
    lines = capsys.readouterr().out.splitlines()
    return dict(re.split(r'  +', line, maxsplit=1) for line in lines)


@pytest.mark.parametrize('name', KINDS)
def test_inspect(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f'{name}.pth'
    shutil.copy(FOREIGN / path.name, path)
    rows = inspected(capsys, path)
    assert list(tmp_path.iterdir()) == [path]
    assert rows['kind'].startswith(f'{KINDS[name]} (')
    assert rows['model'] == 'tensors: 8 of float32 (42 elements, 168 bytes), 1 of int64 (1 element, 8 bytes)'
    assert rows['non-finite'] == 'none' and rows['random'] == 'no states of random generators'
    assert ('no checksums' in rows['file']) == (name == 'bare_legacy')
    assert rows['EMA'].startswith('yes, 6 updates' if name == 'ema' else 'none')
    if KINDS[name] in ('plain', 'stock'):
        assert rows['saved'].startswith('epoch 2, iter 6, at 20') and 'mmengine 0.10.7, seed 0' in rows['saved']
        assert 'amp_wrapper at any level' in rows['resumes']
    expected = {
        'plain_sgd': ('loss scale', 'none'),
        'plain_adamw': ('base group', 'base_param_settings of mmengine'),
        'plain_pair': ('head: groups', '1, 2 parameters, lr 0.125'),
        'ema': ('schedules', '1 state'),
        'stock_sgd': ('loss scale', '2048 (dynamic), 2 clean steps of 4 to the next growth'),
        'stock_adamw': ('optimizer', 'state of 6 parameters; tensors: 18 of float32 (74 elements, 296 bytes)'),
        'stock_bf16': ('loss scale', 'disabled'),
        'apex_wrapper': ('loss scale', '4096 (dynamic by its values), 3 clean steps of 2000 to the next growth'),
        'raw_apex': ('loss scale 1', '512 (dynamic by its values), 1017 clean steps of 2000 to the next growth'),
        'raw_apex_imagenet': ('saved', 'epoch 2'),
        'weights': ('resumes', 'nothing; load the weights with load_from=...'),
        'bare_legacy': ('saved', 'the file does not tell'),
    }
    label, text = expected[name]
    assert rows[label] == text


@pytest.mark.parametrize('version', ['0.10.7', '0.10.12', '1.0.0rc4'])
def test_the_commit_of_the_users_repository_is_not_mmengines_version(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = '2d91ed43092e96ac9cfd59fb615ad8562771e9cf'
    file = read('plain_sgd')
    for ending, expected in (
        ('', ''),
        ('unknown', ''),
        (commit, ', in a repository at commit 2d91ed43'),
        ('7' * 64, ', in a repository at commit 77777777'),
    ):
        meta = {**file['meta'], 'mmengine_version': version + ending}
        checkpoint_file.save({**file, 'meta': meta}, tmp_path / 'file.pth')
        assert f'by mmengine {version}{expected}, seed 0' in inspected(capsys, tmp_path / 'file.pth')['saved']


def test_inspect_our_own(own: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for level, path in own.items():
        rows = inspected(capsys, path)
        assert rows['kind'].startswith('own (') and rows['accumulated'] == 'nothing: it was saved after a step'
        changed = (
            " with loss_scale={'dynamic': True, 'init_scale': 1024.0" if level in ('O1', 'O2') else ', no overrides'
        )
        assert rows['level'].startswith(level + changed)
        if level in ('O1', 'O2'):
            assert rows['loss scale'] == '2048 (dynamic), 2 clean steps of 4 to the next growth; 6 steps, 0 skipped'
        else:
            assert rows['loss scale'].startswith('1 (static)')
        assert ('float16' in rows['optimizer']) == (level == 'O3')
    file = {**losses_file(), 'exact_resume': {}}
    file['state_dict'] = {**file['state_dict'], 'stem.bias': torch.full((4,), float('nan'))}
    checkpoint_file.save(file, tmp_path / 'file.pth')
    rows = inspected(capsys, tmp_path / 'file.pth')
    assert rows['accumulated'] == 'gradients of 5 parameters, 3 losses so far'
    assert rows['non-finite'] == 'stem.bias' and rows['random'] == 'states of the random generators'
    assert rows['loss scale 2'] == '1024 (dynamic), 2 clean steps of 2000 to the next growth; 9 steps, 2 skipped'
    checkpoint_file.save({key: file[key] for key in ('state_dict', 'optimizer')}, tmp_path / 'bare.pth')
    assert '--to stock' in inspected(capsys, tmp_path / 'bare.pth')['resumes']


@pytest.mark.parametrize('target', [t for t in TOOL.TARGETS if t != 'sharded'])
@pytest.mark.parametrize('name', KINDS)
def test_tool_converts_every_file(name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(FOREIGN / f'{name}.pth', source)
    before = source.read_bytes()
    words = [str(source), '--to', target]
    if target == 'stock' and name in POSITION:
        words += ['--epoch', '2', '--iter', '6']
    if target == 'stock' and KINDS[name] == 'weights':
        with pytest.raises(SystemExit, match='AmpCheckpointError: this holds weights and no optimizer'):
            TOOL.main(words)
        assert list(tmp_path.iterdir()) == [source]
        return
    TOOL.main(words)
    said = capsys.readouterr().out
    out = tmp_path / f'epoch_2_{target}.pth'
    assert said.startswith(f'epoch_2.pth -> {out} (')
    assert set(tmp_path.iterdir()) == {source, out} and source.read_bytes() == before
    kind = ('stock' if name in SCALES else 'plain') if target == 'stock' else 'weights'
    assert convert.identify(checkpoint_file.load(out)).kind == kind


def test_a_converted_file_is_not_the_newest_of_its_folder(own: dict[str, Path], tmp_path: Path) -> None:
    """``--resume auto`` takes the original, which has the random states."""
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(own['O2'], source)
    TOOL.main([str(source), '--to', 'stock'])
    assert len(list(tmp_path.glob('*.pth'))) == 2
    assert find_newest(tmp_path).path == source.resolve()


@pytest.mark.parametrize('words, stem', [([], 'epoch_2'), (['--to', 'fp16'], 'epoch_2_fp16')])
def test_publish(words: list[str], stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'epoch_2.pth'
    shutil.copy(FOREIGN / 'stock_sgd.pth', source)
    TOOL.main([str(source), '--publish', *words])
    (out,) = set(tmp_path.iterdir()) - {source}
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    assert out.name == f'{stem}-{digest[:8]}.pth' and str(out) in capsys.readouterr().out
    # what load_url(check_hash=True) looks for in the name
    found = torch.hub.HASH_REGEX.search(out.name)
    assert found is not None and digest.startswith(found.group(1)) and len(found.group(1)) == 8
    assert set(torch.load(out, weights_only=True)) == {'meta', 'state_dict'}
    # the same content has the same name, also where the source has a hash in its own
    again = tmp_path / 'again-0123abcd.pth'
    shutil.copy(source, again)
    TOOL.main([str(again), '--publish', *words])
    assert (tmp_path / out.name.replace('epoch_2', 'again')).read_bytes() == out.read_bytes()
    if not words:
        before = set(tmp_path.iterdir())
        with pytest.raises(SystemExit, match='never overwritten'):
            TOOL.main([str(out), '--publish'])
        assert set(tmp_path.iterdir()) == before


def test_tool_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / 'a.pth'
    shutil.copy(FOREIGN / 'stock_sgd.pth', source)
    before = source.read_bytes()
    (tmp_path / 'link.pth').symlink_to(source)
    for out in (source, tmp_path / 'link.pth', tmp_path / '.' / 'a.pth'):
        with pytest.raises(SystemExit, match='never overwritten'):
            TOOL.main([str(source), str(out), '--to', 'fp16'])
    with pytest.raises(SystemExit, match='is a folder'):
        TOOL.main([str(source), str(tmp_path), '--to', 'fp16'])
    assert source.read_bytes() == before
    for words in (
        [],
        ['x.pth', '--inspect'],
        ['--publish', '--to', 'stock'],
        ['--to', 'fp8'],
        ['--publish', '--iter', '1'],
    ):
        with pytest.raises(SystemExit) as caught:
            TOOL.main([str(source), *words])
        assert caught.value.code == 2
        capsys.readouterr()
    # one flipped bit in a weight
    damaged = bytearray(before)
    position = before.index(read('stock_sgd')['state_dict']['stem.weight'].numpy().tobytes())
    damaged[position] ^= 1
    source.write_bytes(bytes(damaged))
    with pytest.raises(SystemExit, match='checksum'):
        TOOL.main([str(source), '--inspect'])


def test_the_page_shows_what_the_tool_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / 'docs' / 'converting.md').read_text()
    source, out = FOREIGN / 'raw_apex_imagenet.pth', tmp_path / 'epoch_2.pth'
    with pytest.raises(SystemExit) as caught:
        TOOL.main([str(source), str(out), '--to', 'stock'])
    assert f'```text\n{caught.value}\n```' in page
    TOOL.main([str(source), str(out), '--to', 'stock', '--iter', '10010'])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  note: ')]
    assert len(notes) == 3 and '\n'.join(notes) + '\n```' in page
    # every kind has its row
    assert set(re.findall(r'^\| `(\w+)` \|', page, re.MULTILINE)) == set(TOOL.KINDS)


def test_errors_are_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / 'half.pth').write_bytes((FOREIGN / 'ema.pth').read_bytes()[:5000])
    for path, words in (('half.pth', 'is truncated'), ('none.pth', 'is not there')):
        done = _tool(str(tmp_path / path), '--inspect')
        assert done.returncode == 1 and done.stdout == ''
        lines = [line for line in done.stderr.splitlines() if 'Warning' not in line and line.strip()]
        assert len(lines) == 1 and words in lines[0] and lines[0].startswith('AmpCheckpointError: '), done.stderr


# -- found by a reviewer ----------------------------------------------------------------------------------------------


def _tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(ROOT / 'tools/convert_checkpoint.py', *arguments)


@pytest.mark.parametrize(
    ('change', 'words'),
    but_every(
        4,
        [
            (dict(ema_state_dict=[1]), "'ema_state_dict' must be a dict, but is list"),
            (dict(param_schedulers=3), "'param_schedulers' must be a list, but is int"),
            (dict(state_dict={'w': torch.ones(2, 2).to_sparse()}), "'state_dict'['w'] is no plain tensor"),
            (dict(state_dict={7: torch.ones(2)}), "'state_dict' has the key 7, which is no name"),
        ],
    ),
)
def test_odd_files_end_in_a_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = {**torch.load(FOREIGN / 'plain_sgd.pth', weights_only=False), **change}
    torch.save(file, tmp_path / 'odd.pth')
    done = _tool(str(tmp_path / 'odd.pth'), '--inspect')
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr


def test_out_may_stand_behind_the_options(tmp_path: Path) -> None:
    done = _tool(str(FOREIGN / 'plain_sgd.pth'), '--to', 'fp32', str(tmp_path / 'out.pth'))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'out.pth').is_file()


def test_the_config_of_mmcv_1_is_left_out() -> None:
    file = torch.load(FOREIGN / 'plain_sgd.pth', weights_only=False)
    file['meta']['config'] = 'import os'
    converted, notes = convert.to_stock(file)
    assert 'config' not in converted['meta'] and file['meta']['config'] == 'import os'
    assert any('without' in note and 'execute' in note for note in notes)


# -- folders of shards ------------------------------------------------------------------------------------------------


def test_folders_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file becomes a folder, and the folder weights and a file for mmengine, with the bits that the file gives."""
    source = tmp_path / 'stock_dynamic.pth'
    shutil.copy(next(FOREIGN.glob('stock*.pth')), source)
    folder = tmp_path / 'folder'
    TOOL.main([str(source), str(folder), '--to', 'sharded'])
    assert sorted(path.name for path in folder.iterdir()) == ['files.json', 'rest.pth', 'tensors']
    capsys.readouterr()
    of_file, of_folder = inspected(capsys, source), inspected(capsys, folder)
    assert of_folder.pop('file').startswith('folder, ') and of_file.pop('file')
    assert 'any number of processes' in of_folder.pop('resumes') and 'any level' in of_file.pop('resumes')
    assert of_folder == of_file
    for target in ('fp32', 'bf16', 'stock'):
        for path in (source, folder):
            TOOL.main([str(path), str(tmp_path / f'{path.stem}_out.pth'), '--to', target])
        found, wanted = (checkpoint_file.load(tmp_path / f'{stem}_out.pth') for stem in ('folder', source.stem))
        assert differences(found, wanted) == []
    for path in (folder / 'tensors' / '.metadata', folder / 'rest.pth', folder / 'files.json'):
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises(SystemExit, match=r'AmpCheckpointError: .*folder is damaged'):
            TOOL.main([str(folder), '--inspect'])
        path.write_bytes(content)
    with pytest.raises(SystemExit, match='no complete checkpoint'):
        TOOL.main([str(tmp_path), '--inspect'])


def test_folders_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of other things is never taken for a name; a checkpoint is replaced, and may be where the user stands."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(next(FOREIGN.glob('stock*.pth')), 'stock.pth')
    Path('other').mkdir()
    for out, proposed in (('.', 'stock_sharded'), ('other', 'other/stock_sharded'), (str(tmp_path), 'stock_sharded')):
        with pytest.raises(SystemExit, match=f'OUT={re.escape(out)} is a folder, and no checkpoint: .*{proposed}'):
            TOOL.main(['stock.pth', out, '--to', 'sharded'])
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['other', 'stock.pth']
    for _ in range(2):
        TOOL.main(['stock.pth', 'stock_sharded', '--to', 'sharded'])
    monkeypatch.chdir('stock_sharded')
    capsys.readouterr()
    TOOL.main(['.', '--to', 'fp32'])
    assert capsys.readouterr().out.startswith(f'stock_sharded -> {tmp_path}')
    wanted, _ = convert.to_weights(checkpoint_file.load(tmp_path / 'stock.pth'), torch.float32, 'average')
    assert differences(checkpoint_file.load(tmp_path / 'stock_sharded_fp32.pth'), wanted) == []
    with pytest.raises(SystemExit, match='is the source itself'):
        TOOL.main(['.', '.', '--to', 'sharded'])
    # another checkpoint, from inside the folder that it replaces
    TOOL.main(['../stock.pth', '.', '--to', 'sharded'])
    capsys.readouterr()
    assert inspected(capsys, tmp_path / 'stock_sharded')
