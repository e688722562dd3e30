"""tools/migrate_from_apex.py: scripts in every style, each beside what must become of it, and the command line."""

from __future__ import annotations

import ast
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import libcst
import pytest
from command_line import python
from migration import ROOT, Note, calls, files, migrate, migrated, tables

import amp_wrapper
from amp_wrapper import amp, cli
from amp_wrapper.cli import apex_migration

SCRIPTS = ROOT / 'tests' / 'data' / 'migration_scripts'
NAMES = sorted(path.stem for path in SCRIPTS.glob('*.py') if not path.stem.endswith('.expected'))
#: They run two steps on a CPU once they are migrated.
RUNNABLE = {
    'dotted',
    'from_names',
    'fused_optimizers',
    'guarded',
    'layers',
    'oldest',
    'other_names',
    'several_losses',
    'simple',
}


def notes_of(name: str) -> list[str]:
    return (SCRIPTS / f'{name}.notes.txt').read_text().splitlines()


def brief(note: Note) -> str:
    return f'{"hand" if note.by_hand else "done"} {note.line} {note.name}'


def tool(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return python(ROOT / 'tools' / 'migrate_from_apex.py', *words, cwd=cwd or ROOT)


# -- what becomes of a script -----------------------------------------------------------------------------------------


def test_the_example_needs_changes_and_runs_after_them(tmp_path: Path) -> None:
    """What the README shows."""
    example = ROOT / 'examples' / 'apex_style.py'
    shown = tool(example)
    assert shown.returncode == 0 and 'would change: 1. Places left to do by hand: 0.' in shown.stderr
    for line in ('-from apex import amp', '-from apex.optimizers import FusedAdam', '+from amp_wrapper import amp'):
        assert line in shown.stdout.splitlines()
    copied = shutil.copy(example, tmp_path / 'script.py')
    assert tool(copied, '--write').returncode == 0
    for level in ('O2', 'O5'):
        done = python(copied, '--opt-level', level, env={**os.environ, 'PYTHONPATH': str(ROOT)})
        assert done.returncode == 0, done.stderr
        first, last = map(float, re.findall(r'loss (\S+) to (\S+), loss scale', done.stdout)[0])
        assert last < first / 5
    again = tool(copied)
    assert again.stdout == '' and 'would change: 0.' in again.stderr


@pytest.mark.parametrize('name', NAMES)
def test_a_script_becomes_what_lies_beside_it(name: str) -> None:
    result = migrate((SCRIPTS / f'{name}.py').read_bytes())
    assert result.data.decode() == (SCRIPTS / f'{name}.expected.py').read_text()
    assert [brief(note) for note in result.notes] == notes_of(name)


@pytest.mark.parametrize('name', NAMES)
def test_a_second_run_changes_nothing_and_lists_what_is_still_left(name: str) -> None:
    first = migrate((SCRIPTS / f'{name}.py').read_bytes())
    second = migrate(first.data)
    assert second.data == first.data
    assert not second.changed
    todo = {note.text for note in first.by_hand if 'before amp.initialize in line' not in note.text}
    assert todo <= {note.text for note in second.by_hand}


@pytest.mark.parametrize('name', NAMES)
def test_what_is_written_compiles(name: str) -> None:
    text = (SCRIPTS / f'{name}.expected.py').read_text()
    tree = ast.parse(text)
    if any(line.startswith('hand') for line in notes_of(name)) or name.startswith('shadowed'):
        return
    imported = [node.module or '' for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [module for module in imported if module.split('.')[0] == 'apex']


def test_every_kind_of_outcome_is_among_the_scripts() -> None:
    lines = {name: notes_of(name) for name in NAMES}
    assert {name for name in NAMES if not any(line.startswith('hand') for line in lines[name])} >= RUNNABLE
    assert sum(any(line.startswith('hand') for line in found) for found in lines.values()) >= 6


@pytest.mark.parametrize('name', sorted(RUNNABLE))
def test_a_migrated_script_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'argv', ['script'])
    with warnings.catch_warnings():
        warnings.simplefilter('error', FutureWarning)
        losses = runpy.run_path(str(SCRIPTS / f'{name}.expected.py'))['main']()
    assert len(losses) >= 2
    assert all(math.isfinite(loss) for loss in losses)
    if name not in ('layers', 'from_names', 'several_losses', 'guarded'):
        # the same input at every step
        assert losses[1] < losses[0]


def test_every_name_that_is_written_exists() -> None:
    import torch

    for target in {*tables.RENAMED.values(), 'amp_wrapper.FusedAdam', 'amp_wrapper.FusedAdamW', 'amp_wrapper.FusedSGD'}:
        found: object = {'torch': torch, 'amp_wrapper': amp_wrapper}[target.split('.')[0]]
        for part in target.split('.')[1:]:
            found = getattr(found, part)


def test_what_a_migrated_script_uses_of_this_package_is_not_left_over() -> None:
    assert sorted((*tables.AMP_NAMES, *tables.OWN_NAMES)) == sorted(amp.__all__)
    used = '\n'.join(f'print(amp.{name}(o).x)' for name in amp.__all__ if name not in ('init', 'initialize'))
    assert migrate(f'from amp_wrapper import amp\n{used}\n'.encode()).notes == ()
    left = migrate(b'from amp_wrapper import amp\nprint(amp.loss_scael(o))\n').notes
    assert len(left) == 1 and 'loss_scael' in str(left[0])


def test_every_listed_name_says_what_to_write() -> None:
    words = re.compile(r'write|use|apex still has|amp\.|torch|docs/')
    assert not [name for name, text in tables.LISTED.items() if not words.search(text)]


def test_the_page_has_every_name_and_argument() -> None:
    page = (ROOT / 'docs' / 'migrating_from_apex.md').read_text()
    page = re.sub(r'^```.*?^```', '', page, flags=re.MULTILINE | re.DOTALL)
    words = {word for code in re.findall(r'`([^`]+)`', page) for word in re.findall(r'\w+', code)}
    names = {part for name in (*tables.LISTED, *tables.AMP_NAMES) for part in name.split('.')}
    # told in words: deeper names of what is there, and helpers that nobody imports
    names -= {'clip_grad', 'xentropy', 'clip_grad_norm', 'Fused_Weight_Norm'}
    arguments = {name for order in (*calls._AMP.values(), calls._DDP, calls._ADAM, calls._SGD) for name in order}
    arguments -= {'params', 'loss'}
    # shared by FusedSGD and torch: "the same first six arguments"
    arguments -= {'momentum', 'dampening', 'nesterov', 'dynamic_loss_scale', 'loss_scaler'}
    assert sorted((names | arguments) - words) == []


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_line_ends_and_encoding_stay() -> None:
    text = '# -*- coding: latin-1 -*-\r\nfrom apex import amp  # caf\xe9\r\nx = "\xfc"\r\n'
    result = migrate(text.encode('latin-1'))
    assert result.data == text.replace('apex', 'amp_wrapper').encode('latin-1')
    bare = 'from apex import amp'
    assert migrate(bare.encode()).data == b'from amp_wrapper import amp'
    tabs = 'if 1:\n\tfrom apex.optimizers import FusedSGD\n\topt = FusedSGD(m.parameters(), 0.1)\n'
    after = migrated(tabs)
    assert after == tabs.replace('apex.optimizers', 'amp_wrapper')
    assert migrated(tabs.replace('\n', '\r\n')) == after.replace('\n', '\r\n')


def test_a_byte_order_mark_stays() -> None:
    text = b'\xef\xbb\xbffrom apex import amp\n'
    assert migrate(text).data == b'\xef\xbb\xbffrom amp_wrapper import amp\n'


@pytest.mark.parametrize('data', [b'from apex import amp\nprint "two"\n', b'# apex\n\xff\xfe = 1\n'])
def test_what_is_no_python_raises(data: bytes) -> None:
    with pytest.raises((SyntaxError, UnicodeDecodeError)):
        migrate(data)


def test_a_file_without_apex_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcst, 'parse_module', None)
    assert not migrate(b'import torch\n').changed
    with pytest.raises(TypeError):
        migrate(b'import apex\n')


# -- the command line -------------------------------------------------------------------------------------------------


def test_shows_a_diff_that_patch_can_apply(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / 'simple.py', tmp_path / 'train.py')
    done = tool('train.py', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('--- a/train.py\n+++ b/train.py\n@@ ')
    assert '-from apex import amp\n+from amp_wrapper import amp\n' in done.stdout
    assert (tmp_path / 'train.py').read_bytes() == (SCRIPTS / 'simple.py').read_bytes()
    assert 'Left to do by hand' not in done.stderr
    if shutil.which('patch'):
        subprocess.run(['patch', '-p1'], input=done.stdout, text=True, cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / 'train.py').read_bytes() == (SCRIPTS / 'simple.expected.py').read_bytes()


def test_writes_keeps_the_mode_and_follows_a_link(tmp_path: Path) -> None:
    script = tmp_path / 'train.py'
    shutil.copy(SCRIPTS / 'simple.py', script)
    script.chmod(0o750)
    (tmp_path / 'link.py').symlink_to(script)
    done = tool('link.py', '--write', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert script.read_bytes() == (SCRIPTS / 'simple.expected.py').read_bytes()
    assert script.stat().st_mode & 0o777 == 0o750
    assert (tmp_path / 'link.py').is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['link.py', 'train.py']
    again = tool('train.py', '--write', cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, '')


def test_lists_what_is_left_with_file_and_line(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / 'left_of_apex.py', tmp_path)
    done = tool('left_of_apex.py', '--write', cwd=tmp_path)
    assert done.returncode == 1
    for line in notes_of('left_of_apex'):
        _, number, name = line.split(' ', 2)
        assert f'left_of_apex.py:{number}: {name}: ' in done.stderr
    assert tool('left_of_apex.py', cwd=tmp_path).returncode == 1


def test_a_folder_and_what_is_skipped_in_it(tmp_path: Path) -> None:
    names = ['a.py', 'deep/er/b.py']
    skipped = ['.hidden/c.py', 'build/c.py', 'venv/c.py', 'mine/pyvenv.cfg', 'mine/c.py', 'x.egg-info/c.py', 'd.yaml']
    for name in [*names, *skipped]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('from apex import amp\n')
    assert [str(path.relative_to(tmp_path)) for path in files.find([tmp_path, tmp_path / 'a.py'])] == names
    done = tool(tmp_path, '--write')
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name).read_text() == 'from amp_wrapper import amp\n' for name in names)
    assert all((tmp_path / name).read_text() == 'from apex import amp\n' for name in skipped)


def test_a_file_that_does_not_parse_is_listed_and_the_others_are_done(tmp_path: Path) -> None:
    (tmp_path / 'bad.py').write_text('from apex import amp\nprint "two"\n')
    (tmp_path / 'good.py').write_text('from apex import amp\n')
    done = tool('.', '--write', cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r'^bad\.py:2: .*left as it is', done.stderr, re.MULTILINE)
    assert (tmp_path / 'bad.py').read_text() == 'from apex import amp\nprint "two"\n'
    assert (tmp_path / 'good.py').read_text() == 'from amp_wrapper import amp\n'
    assert 'Traceback' not in done.stderr


def test_a_read_only_file_is_left_and_named(tmp_path: Path) -> None:
    script = tmp_path / 'train.py'
    script.write_text('from apex import amp\n')
    script.chmod(0o444)
    assert tool(script).returncode == 0
    done = tool(script, '--write')
    assert done.returncode == 2
    assert f'{script}: cannot be written: the file is read-only' in done.stderr
    assert script.read_text() == 'from apex import amp\n'
    assert [path.name for path in tmp_path.iterdir()] == ['train.py']


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / 'train.py'
    script.write_text('old')

    def broken(source: str, target: Path) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', broken)
    with pytest.raises(OSError, match='No space'):
        files.write(script, b'new')
    assert script.read_text() == 'old'
    assert [path.name for path in tmp_path.iterdir()] == ['train.py']


def test_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text('apex: true\n')
    for words, said in (
        ([], 'PATH'),
        ([tmp_path / 'none.py'], 'does not exist'),
        ([tmp_path / 'config.yaml'], 'must end in .py'),
    ):
        done = tool(*words)
        assert done.returncode == 2
        assert said in done.stderr
        assert 'Traceback' not in done.stderr


def test_what_cannot_be_parsed_is_listed_with_the_line_of_python() -> None:
    with pytest.raises(SyntaxError) as caught:
        migrate(b'# cell\n%matplotlib inline\nfrom apex import amp\n')
    assert caught.value.lineno == 2


def test_a_defect_of_the_tool_in_one_file_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ('a.py', 'b.py'):
        (tmp_path / name).write_text(f'from apex import amp  # {name}\n')

    def broken(data: bytes, package: bool = False) -> object:
        if b'a.py' in data:
            raise KeyError('defect')
        return migrate(data, package)

    monkeypatch.setattr(apex_migration, 'migrate', broken)
    assert cli.main(['migrate', str(tmp_path), '--write']) == 2
    assert "a.py: is left as it is, by a defect of this tool: KeyError: 'defect'" in capsys.readouterr().err
    assert (tmp_path / 'a.py').read_text().startswith('from apex ')
    assert (tmp_path / 'b.py').read_text().startswith('from amp_wrapper ')


def test_a_result_that_is_no_python_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.RENAMED, 'apex.parallel.DistributedDataParallel', 'torch.nn.parallel.None')
    with pytest.raises(RuntimeError, match='line 1 of the result is no Python'):
        migrate(b'from apex.parallel import DistributedDataParallel as DDP\nDDP(m)\n')


def test_a_form_feed_ends_no_line_of_the_diff(tmp_path: Path) -> None:
    (tmp_path / 'a.py').write_bytes(b'from apex import amp\n\x0c\nx = 1  # a\x0cb\n')
    result = tool(tmp_path)
    assert 'No newline' not in result.stdout
    (tmp_path / 'the.diff').write_text(result.stdout)
    assert ' x = 1  # a\x0cb\n' in (tmp_path / 'the.diff').read_text()


def test_a_reader_that_has_enough_gets_no_traceback(tmp_path: Path) -> None:
    for index in range(200):
        (tmp_path / f'{index}.py').write_text('from apex import amp\n' + f'# {index}\n' * 200)
    command = [sys.executable, str(ROOT / 'tools' / 'migrate_from_apex.py'), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert 'Traceback' not in process.stderr.read()


def test_the_imports_of_a_package_stay(tmp_path: Path) -> None:
    (tmp_path / '__init__.py').write_text('from apex.optimizers import FusedLAMB\n')
    result = tool(tmp_path, '--write')
    assert result.returncode == 1
    assert '__init__.py:1: apex.optimizers.FusedLAMB: other files may import it from here' in result.stderr
    assert (tmp_path / '__init__.py').read_text() == 'from apex.optimizers import FusedLAMB\n'
