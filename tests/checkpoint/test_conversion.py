"""``amp-wrapper convert``: what it says about a file of any kind, the weights that it takes out, and what it refuses."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from bits import differences
from damage import with_flipped_bit
from foreign import read

from amp_wrapper.cli import main

Capture = pytest.CaptureFixture[str]
#: The kind of each file, and what else is said about it: the row, and words in it.
KINDS: dict[str, tuple[str, str, str]] = {
    'plain_sgd': ('plain', 'groups', '1, 6 parameters, lr 0.0625'),
    'plain_adamw': ('plain', 'optimizer', '18 of float32'),
    'plain_pair': ('plain', 'head: groups', '2 parameters, lr 0.125'),
    'ema': ('plain', 'EMA', "the average is in 'state_dict'"),
    'stock_sgd': ('stock', 'loss scale', '2048 (dynamic)'),
    'stock_adamw': ('stock', 'optimizer', '18 of float32'),
    'stock_bf16': ('stock', 'loss scale', 'disabled'),
    'apex_wrapper': ('apex', 'loss scale', '4096 (dynamic)'),
    'raw_apex': ('raw_apex', 'loss scale 1', '512 (dynamic)'),
    'raw_apex_imagenet': ('raw_apex', 'saved', 'epoch 2'),
    'weights': ('weights', 'saved', 'epoch'),
    'bare_legacy': ('weights', 'saved', 'does not tell'),
}
TYPES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16}


def inspected(capsys: Capture, path: Path) -> dict[str, str]:
    """The rows of ``--inspect``."""
    assert main(['convert', str(path), '--inspect']) == 0
    return dict(re.split(r'  +', line, maxsplit=1) for line in capsys.readouterr().out.splitlines())  # type: ignore[misc]


def error(capsys: Capture, *words: object) -> str:
    """The one line in which the command ends."""
    capsys.readouterr()
    assert main(['convert', *map(str, words)]) == 1
    said = capsys.readouterr()
    assert said.out == '' and said.err.startswith('amp-wrapper convert: error: ') and said.err.count('\n') == 1
    return said.err


def convert(content: Any, folder: Path, *words: str) -> Any:
    """What becomes of a file."""
    torch.save(content, folder / 'source.pth')
    assert main(['convert', str(folder / 'source.pth'), str(folder / 'out.pth'), *words]) == 0
    return read(folder / 'out.pth')


# -- inspection -------------------------------------------------------------------------------------------------------


def test_every_kind_of_file_is_described(tmp_path: Path, capsys: Capture) -> None:
    assert {path.stem for path in foreign.FOLDER.glob('*.pth')} == set(KINDS)
    for name, (kind, row, words) in KINDS.items():
        rows = inspected(capsys, foreign.FOLDER / f'{name}.pth')
        assert rows['kind'] == kind and words in rows[row], (name, rows)
        assert rows['model'] == '8 of float32, 1 of int64 (43 elements)' and rows['non-finite'] == 'none'
        assert ('EMA' in rows) == (name == 'ema')
        if kind in ('plain', 'stock'):
            assert rows['saved'] == 'epoch 2, iter 6'


def test_files_of_every_level_are_described(own_runs: Any, tmp_path: Path, capsys: Capture) -> None:
    for level, (path, _) in own_runs.items():
        rows = inspected(capsys, path)
        assert rows['kind'] == 'own' and rows['level'] == level
        assert rows['loss scale'] == ('2048 (dynamic)' if level in ('O1', 'O2') else '1 (static)')
        assert ('float16' in rows['optimizer']) == (level == 'O3')
    file = read(own_runs['O2'][0])
    file['state_dict']['stem.bias'] = torch.full((4,), float('nan'))
    torch.save(file, tmp_path / 'file.pth')
    assert inspected(capsys, tmp_path / 'file.pth')['non-finite'] == 'stem.bias'


def test_open_accumulation_is_described(tmp_path: Path, capsys: Capture) -> None:
    # three iterations an epoch, in accumulations of two
    wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=foreign.SGD, accumulative_counts=2)
    foreign.run(tmp_path, wrapper, epochs=3)
    assert inspected(capsys, tmp_path / 'epoch_1.pth')['accumulated'] == 'gradients of 6 parameters'
    assert 'accumulated' not in inspected(capsys, tmp_path / 'epoch_2.pth')


def test_file_with_8_bit_weights_is_described(tmp_path: Path, capsys: Capture) -> None:
    file = read('weights.pth')
    file['state_dict']['small'] = torch.ones(3).to(torch.float8_e4m3fn)
    file['state_dict']['sparse'] = torch.eye(3).to_sparse()
    file['state_dict']['quantized'] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save(file, tmp_path / 'file.pth')
    rows = inspected(capsys, tmp_path / 'file.pth')
    assert 'float8' in rows['model'] and 'qint8' in rows['model'] and rows['non-finite'] == 'none'


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_of_every_file(tmp_path: Path) -> None:
    for name, (word, dtype) in itertools.product(KINDS, TYPES.items()):
        file, result = read(f'{name}.pth'), tmp_path / 'result.pth'
        source = shutil.copy(foreign.FOLDER / f'{name}.pth', tmp_path / 'source.pth')
        assert main(['convert', str(source), str(result), '--to', word]) == 0
        assert Path(source).read_bytes() == (foreign.FOLDER / f'{name}.pth').read_bytes()
        content = read(result)
        result.unlink()
        assert list(content) == ['meta', 'state_dict'] and content['meta'] == file.get('meta', {}), name
        expected = {}
        for key, value in file.get('state_dict', file.get('model', file)).items():
            # a variance of float16 may be 0
            kept = torch.float32 if word == 'fp16' and 'running' in key else dtype
            expected[key.removeprefix('module.')] = value.to(kept) if value.is_floating_point() else value
        assert differences(content['state_dict'], expected, ordered=True) == [], (name, word)


def test_types_that_are_left_alone_and_values_that_do_not_fit(tmp_path: Path, capsys: Capture) -> None:
    tied = torch.tensor([1.5, 1e-9, 0.0])
    weights = {
        'a': tied,
        'b': tied,
        'large': torch.tensor([1.0, 70000.0]),
        'infinite': torch.tensor([float('inf'), float('nan')]),
        'double': torch.tensor([1e300], dtype=torch.float64),
        'complex': torch.tensor([1j]),
        'half': torch.tensor([0.5], dtype=torch.float16),
        'brain': torch.tensor([0.5], dtype=torch.bfloat16),
        'empty': torch.zeros(0),
        'x._extra_state': {'any': 'thing'},
    }
    expected = {
        'fp16': dict.fromkeys(('a', 'b', 'infinite', 'brain', 'empty'), torch.float16),
        'bf16': dict.fromkeys(('a', 'b', 'large', 'infinite', 'half', 'empty'), torch.bfloat16),
        'fp32': dict.fromkeys(('half', 'brain'), torch.float32),
    }
    for word, changed in expected.items():
        result = convert({'state_dict': weights, 'meta': {}}, tmp_path, '--to', word)['state_dict']
        said = capsys.readouterr().out
        for name, value in weights.items():
            wanted = value.to(changed.get(name, value.dtype)) if isinstance(value, torch.Tensor) else value
            assert differences(result[name], wanted) == [], (word, name)
        # they are one tensor in the file, too
        assert result['a'].data_ptr() == result['b'].data_ptr()
        assert ('kept in float32: large' in said) == ('1 elements were too small' in said) == (word == 'fp16'), said


def test_average_or_trained_weights(tmp_path: Path, capsys: Capture) -> None:
    file = read('ema.pth')
    prefix = 'module.'
    trained = {key[len(prefix) :]: value for key, value in file['ema_state_dict'].items() if key.startswith(prefix)}
    assert differences(trained['stem.weight'], file['state_dict']['stem.weight'])
    for words, expected in (([], file['state_dict']), (['--weights', 'trained'], trained)):
        result = convert(file, tmp_path, '--to', 'fp32', *words)['state_dict']
        assert differences(result, dict(expected)) == [], words
        assert 'average' in capsys.readouterr().out
    plain = read('plain_sgd.pth')
    result = convert(plain, tmp_path, '--to', 'fp32', '--weights', 'trained')['state_dict']
    assert differences(result, dict(plain['state_dict'])) == [] and 'no average' in capsys.readouterr().out


def test_weights_are_saved_from_files_that_nothing_resumes_from(tmp_path: Path) -> None:
    """apex's scale could fall to 0."""
    for lost in (dict(amp={'loss_scaler0': {'loss_scale': 0.0, 'unskipped': 0}}), dict(optimizer={'state': 3})):
        file = {**read('raw_apex.pth'), **lost}
        assert differences(convert(file, tmp_path, '--to', 'fp32')['state_dict'], dict(file['model'])) == []
        assert main(['convert', str(tmp_path / 'source.pth'), '--inspect']) == 1


def test_published_file_has_its_hash_in_its_name(tmp_path: Path, capsys: Capture) -> None:
    source = Path(shutil.copy(foreign.FOLDER / 'stock_sgd.pth', tmp_path / 'epoch_2.pth'))
    # the same content has the same hash, also where the source has one in its own name
    again = Path(shutil.copy(source, tmp_path / 'again-0123abcd.pth'))
    for words, stem in ((['--to', 'fp16'], '_fp16'), ([], '')):
        before = set(tmp_path.iterdir())
        assert main(['convert', str(source), '--publish', *words]) == 0
        (out,) = set(tmp_path.iterdir()) - before
        digest = hashlib.sha256(out.read_bytes()).hexdigest()
        assert out.name == f'epoch_2{stem}-{digest[:8]}.pth' and str(out) in capsys.readouterr().out
        # what load_url(check_hash=True) looks for in the name
        found = torch.hub.HASH_REGEX.search(out.name)
        assert found is not None and digest.startswith(found.group(1)) and len(found.group(1)) == 8
        assert set(read(out)) == {'meta', 'state_dict'}
        assert main(['convert', str(again), '--publish', *words]) == 0
        assert (tmp_path / out.name.replace('epoch_2', 'again')).read_bytes() == out.read_bytes()
    before = set(tmp_path.iterdir())
    assert 'never overwritten' in error(capsys, out, '--publish')
    assert set(tmp_path.iterdir()) == before


# -- refusals ---------------------------------------------------------------------------------------------------------

#: What is in a file, and the word that the error has to name.
ODD: dict[str, tuple[Any, str]] = {
    'the optimizer is a list': ({'model': {}, 'optimizer': []}, 'optimizer'),
    'the optimizer is empty': ({'model': {}, 'optimizer': {}}, "'param_groups'"),
}


def test_odd_files_end_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    for content, word in ODD.values():
        torch.save(content, tmp_path / 'file.pth')
        assert word in error(capsys, tmp_path / 'file.pth', '--inspect')
    torch.save({**read('ema.pth'), 'ema_state_dict': {'module.x': torch.ones(1)}}, tmp_path / 'file.pth')
    said = error(capsys, tmp_path / 'file.pth', tmp_path / 'out.pth', '--to', 'fp32', '--weights', 'trained')
    assert "'x'" in said and not (tmp_path / 'out.pth').exists()


def test_source_is_never_overwritten(tmp_path: Path, capsys: Capture) -> None:
    source = Path(shutil.copy(foreign.FOLDER / 'stock_sgd.pth', tmp_path / 'a.pth'))
    before = source.read_bytes()
    (tmp_path / 'link.pth').symlink_to(source)
    for out in (source, tmp_path / 'link.pth', f'{tmp_path}/./a.pth'):
        assert 'never overwritten' in error(capsys, source, out, '--to', 'fp16')
    assert 'is a folder' in error(capsys, source, tmp_path, '--to', 'fp16')
    (tmp_path / 'file').write_text('')
    assert 'could not be written' in error(capsys, source, tmp_path / 'file' / 'out.pth', '--to', 'fp16')
    assert source.read_bytes() == before
    source.write_bytes(with_flipped_bit(before, read(source)['state_dict']['stem.weight']))
    assert 'checksum' in error(capsys, source, '--inspect')
    assert 'is not there' in error(capsys, tmp_path / 'none.pth', '--inspect')


def test_wrong_words_end_with_status_2(tmp_path: Path, capsys: Capture) -> None:
    for words in ([], ['x.pth', '--inspect'], ['--to', 'fp8'], ['--weights', 'mean', '--inspect']):
        with pytest.raises(SystemExit) as caught:
            main(['convert', 'a.pth', *words])
        assert caught.value.code == 2 and 'error: ' in capsys.readouterr().err
    # the output may be named behind the options
    assert main(['convert', str(foreign.FOLDER / 'ema.pth'), '--to', 'fp16', str(tmp_path / 'out.pth')]) == 0
    assert (tmp_path / 'out.pth').is_file()
