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

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / 'tests' / 'migration_scripts'
NAMES = sorted(path.stem for path in SCRIPTS.glob('*.py') if not path.stem.endswith('.expected'))
#: They run two steps on a CPU once they are migrated.
RUNNABLE = {
    'dotted',
    'fp16_in_functions',
    'fp16_optimizer',
    'from_names',
    'fused_optimizers',
    'guarded',
    'layers',
    'oldest',
    'other_names',
    'several_losses',
    'simple',
}
sys.path.insert(0, str(ROOT / 'tools'))

import libcst
from apex_migration import Note, calls, fp16_optimizer, migrate, tables
from apex_migration.files import find

import amp_wrapper.amp


def notes_of(name: str) -> list[str]:
    return (SCRIPTS / f'{name}.notes.txt').read_text().splitlines()


def brief(note: Note) -> str:
    return f'{"hand" if note.by_hand else "done"} {note.line} {note.name}'


def migrated(text: str) -> str:
    result = migrate(text.encode())
    return result.after if result.changed else text


def left(text: str) -> list[str]:
    return [note.name for note in migrate(text.encode()).by_hand]


def tool(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / 'tools' / 'migrate_from_apex.py'), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


# -- what becomes of a script -----------------------------------------------------------------------------------------


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
    arguments |= set(fp16_optimizer._ORDER) | set(fp16_optimizer._ATTRIBUTES) | set(fp16_optimizer._SCALER)
    arguments -= {'params', 'loss', 'init_optimizer', 'fp16_groups', 'fp32_from_fp32_groups', 'fp32_from_fp16'}
    # shared by FusedSGD and torch: "the same first six arguments"
    arguments -= {'momentum', 'dampening', 'nesterov', 'dynamic_loss_scale', 'loss_scaler'}
    assert sorted((names | arguments) - words) == []


# -- names and scopes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        'from torch.cuda import amp\namp._amp_state\n# apex\n',
        'from .apex import amp\namp._amp_state.handle\n',
        'def f(apex):\n    return apex.optimizers.FusedLAMB\n',
        'import other as apex\napex.optimizers.FusedLAMB()\n',
        "choices = ['native', 'apex']\n",
        '"""Trains as apex.amp did."""\n',
        'class A:\n    apex = 1\n    x = apex\n',
        'def f(fp16=dict(loss_scale=1)):\n    fp16 = dict(loss_scale=2)\n    return fp16\n',
    ],
)
def test_what_only_looks_like_apex_is_left_alone(text: str) -> None:
    assert migrated(text) == text
    assert left(text) == []


def test_a_local_name_hides_the_import() -> None:
    text = 'from apex.optimizers import FusedAdam\n\n\ndef f(FusedAdam):\n    return FusedAdam(1)\n\n\nFusedAdam(1)\n'
    expected = text.replace('from apex.optimizers import FusedAdam', 'from amp_wrapper import FusedAdamW')
    assert migrated(text) == expected.replace('\n\nFusedAdam(1)', '\n\nFusedAdamW(1, weight_decay=0.0)')


def test_an_import_in_a_function_is_changed_there() -> None:
    text = 'def f():\n    from apex import amp\n    return amp.init()\n\n\ndef g(amp):\n    return amp._amp_state\n'
    assert migrated(text) == text.replace('from apex', 'from amp_wrapper')
    assert left(text) == []


def test_torch_is_imported_where_it_is_not() -> None:
    text = 'from apex.parallel import convert_syncbn_model\n\nmodel = convert_syncbn_model(model)\n'
    expected = 'import torch\n\nmodel = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n'
    assert migrated(text) == expected
    hidden = text.replace('\n\nmodel', '\n\ntorch = None\nmodel', 1)
    assert left(hidden) == ['apex.parallel.convert_syncbn_model']
    assert 'torch.nn' not in migrated(hidden)


def test_an_existing_name_is_not_taken() -> None:
    text = 'from torch.cuda import amp\nfrom apex.fp16_utils import FP16_Optimizer\n'
    text += (
        'opt = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.1))\nwith amp.autocast():\n    opt.backward(loss)\n'
    )
    after = migrated(text)
    assert 'import amp_wrapper.amp\n' in after
    assert 'net, opt = amp_wrapper.amp.initialize(net, torch.optim.SGD(net.parameters(), 0.1), ' in after
    assert 'with amp_wrapper.amp.scale_loss(loss, opt) as scaled_loss:' in after
    text = 'from apex.optimizers import FusedAdam\nfrom other import FusedAdamW\nFusedAdam(1)\nFusedAdamW(2)\n'
    assert 'from amp_wrapper import FusedAdamW as FusedAdam\n' in migrated(text)


def test_a_fallback_under_the_same_name_keeps_the_name() -> None:
    text = 'try:\n    from apex.optimizers import FusedAdam\n'
    text += 'except ImportError:\n    from torch.optim import AdamW as FusedAdam\n'
    after = migrated(text + 'FusedAdam(p, weight_decay=0.1)\n')
    assert 'from amp_wrapper import FusedAdamW as FusedAdam\n' in after
    assert after.endswith('AdamW as FusedAdam\nFusedAdam(p, weight_decay=0.1)\n')


def test_a_keyword_is_no_name() -> None:
    text = 'import apex\n\nf(apex=apex.amp.init(), other=apex)\n'
    assert migrated(text) == 'import amp_wrapper.amp\n\nf(apex=amp_wrapper.amp.init(), other=amp_wrapper)\n'


def test_import_apex_stays_where_apex_is_still_used() -> None:
    text = 'import apex\napex.amp.init()\napex.optimizers.FusedLAMB(p)\n'
    assert (
        migrated(text) == 'import amp_wrapper.amp\nimport apex\namp_wrapper.amp.init()\napex.optimizers.FusedLAMB(p)\n'
    )
    assert migrated('import apex\napex.amp.init()\n') == 'import amp_wrapper.amp\namp_wrapper.amp.init()\n'
    assert migrated('try:\n    import apex\n    HAVE = True\nexcept ImportError:\n    HAVE = False\n').startswith(
        'try:\n    import amp_wrapper\n    HAVE'
    )


def test_two_statements_on_a_line_and_an_import_alone_in_a_block() -> None:
    assert migrated('from apex import amp; x = 1\n') == 'from amp_wrapper import amp; x = 1\n'
    text = 'import torch\nif sync: import apex.parallel\nm = apex.parallel.convert_syncbn_model(m)\n'
    expected = 'import torch\nif sync: pass\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n'
    assert migrated(text) == expected


def test_layout_and_comments_stay() -> None:
    text = 'from apex.amp import (  # ours\n    initialize,  # casts\n    # scales\n    scale_loss as scale,\n)\n'
    assert migrated(text) == text.replace('apex', 'amp_wrapper')
    text = '# header\n\n# about it\nfrom apex import amp, parallel  # tail\n\nparallel.convert_syncbn_model(m)\nimport torch\n'
    after = migrated(text)
    assert after.startswith('# header\n\n# about it\n') and '  # tail\n' in after


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('before', 'after', 'by_hand'),
    [
        ('DDP(m)', 'DDP(m)', 0),
        ('DDP(m, delay_allreduce=True)', 'DDP(m)', 0),
        ('DDP(module=m, message_size=1, prof=True)', 'DDP(module=m)', 0),
        ('DDP(m, gradient_average=True, allreduce_always_fp32=False)', 'DDP(m)', 0),
        ('DDP(m, gradient_average=flag)', 'DDP(m, gradient_average=flag)', 1),
        ('DDP(m, 1, True, None, None, False, True)', 'DDP(m, allreduce_always_fp32=True)', 1),
        ('DDP(m, device_ids=[0])', 'DDP(m, device_ids=[0])', 1),
    ],
)
def test_arguments_of_distributed_data_parallel(before: str, after: str, by_hand: int) -> None:
    text = f'from apex.parallel import DistributedDataParallel as DDP\n{before}\n'
    assert migrated(text) == f'from torch.nn.parallel import DistributedDataParallel as DDP\n{after}\n'
    assert len(left(text)) == by_hand


@pytest.mark.parametrize(
    ('before', 'after'),
    [
        ('FusedAdam(p)', 'FusedAdamW(p, weight_decay=0.0)'),
        ('FusedAdam(p, weight_decay=w)', 'FusedAdamW(p, weight_decay=w)'),
        ('FusedAdam(p, 1, True, b, e)', 'FusedAdamW(p, 1, betas=b, eps=e, weight_decay=0.0)'),
        ('FusedAdam(p, adam_w_mode=False)', 'FusedAdam(p)'),
        ('FusedAdam(p, adam_w_mode=False, weight_decay=w)', 'FusedAdam(p, weight_decay=w)'),
        ('FusedAdam(\n    p,\n    lr=1,\n)', 'FusedAdamW(\n    p,\n    lr=1,\n    weight_decay=0.0,\n)'),
        ('FusedAdam(\n    p,\n    capturable=True\n)', 'FusedAdamW(\n    p, weight_decay=0.0\n)'),
    ],
)
def test_arguments_of_fused_adam(before: str, after: str) -> None:
    text = f'from apex.optimizers import FusedAdam\n{before}\n'
    name = after.partition('(')[0]
    assert migrated(text) == f'from amp_wrapper import {name}\n{after}\n'
    assert left(text) == []


@pytest.mark.parametrize(
    'call',
    [
        'FusedAdam(p, bias_correction=False)',
        'FusedAdam(p, adam_w_mode=mode)',
        'FusedAdam(p, master_weights=True)',
        'FusedAdam(p, **options)',
        'FusedAdam(*everything)',
        'FusedAdam(p, max_grad_norm=1.0)',
        'partial(FusedAdam, lr=1)',
        'FusedSGD(p, 0.1, wd_after_momentum=True)',
        'FusedLAMB(p)',
    ],
)
def test_an_optimizer_that_cannot_be_told_stays(call: str) -> None:
    name = 'FusedAdam' if 'FusedAdam' in call else call.partition('(')[0]
    text = f'from apex.optimizers import {name}\n{call}\n'
    assert migrated(text) == text
    assert left(text) == [f'apex.optimizers.{name}']


def test_fused_adam_means_the_same() -> None:
    """apex's default is decoupled decay of 0; torch's AdamW, and so ours, would decay by 0.01."""
    import inspect

    assert inspect.signature(amp_wrapper.FusedAdamW).parameters['weight_decay'].default == 1e-2
    assert inspect.signature(amp_wrapper.FusedAdam).parameters['weight_decay'].default == 0
    apex = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for cls in (amp_wrapper.FusedAdam, amp_wrapper.FusedAdamW):
        assert {name: inspect.signature(cls).parameters[name].default for name in apex} == apex
    order = list(inspect.signature(amp_wrapper.FusedSGD).parameters)
    assert order[:6] == ['params', 'lr', 'momentum', 'dampening', 'weight_decay', 'nesterov']


@pytest.mark.parametrize(
    ('given', 'scale'),
    [
        ('', '1.0'),
        (', 128.0', '128.0'),
        (', dynamic_loss_scale=True', "'dynamic'"),
        (', static_loss_scale=s, dynamic_loss_scale=False', 's'),
        (', s, d', "'dynamic' if d else s"),
        (', dynamic_loss_scale=True, dynamic_loss_args=None', "'dynamic'"),
        (
            ', dynamic_loss_scale=True, dynamic_loss_args=dict(scale_factor=4.)',
            'dict(growth_factor=4., backoff_factor=1 / 4.)',
        ),
        (', dynamic_loss_scale=True, dynamic_loss_args=args', None),
        (', dynamic_loss_scale=True, dynamic_loss_args=dict(min_scale=1)', None),
        (', max_grad_norm=1.0', None),
    ],
)
def test_loss_scale_of_fp16_optimizer(given: str, scale: str | None) -> None:
    text = 'from apex.fp16_utils import FP16_Optimizer\nopt = SGD(net.parameters(), 0.1)\n'
    text += f'opt = FP16_Optimizer(opt{given})\n'
    if scale is None:
        assert migrated(text) == text
        assert left(text) == ['apex.fp16_utils.FP16_Optimizer']
    else:
        assert f"net, opt = amp.initialize(net, opt, opt_level='O2', loss_scale={scale})\n" in migrated(text)
        assert left(text) == []


@pytest.mark.parametrize(
    'lines',
    [
        'opt = FP16_Optimizer(make(net))',
        'opt = FP16_Optimizer(SGD(list(a.parameters()) + list(b.parameters())))',
        'opts.append(FP16_Optimizer(SGD(net.parameters())))',
        'a = b = FP16_Optimizer(SGD(net.parameters()))',
        'from apex.parallel import DistributedDataParallel\n'
        'net = DistributedDataParallel(net)\nopt = FP16_Optimizer(SGD(net.parameters()))',
    ],
)
def test_fp16_optimizer_that_cannot_be_told_is_listed_with_its_calls(lines: str) -> None:
    text = f'from apex.fp16_utils import FP16_Optimizer\n{lines}\nopt.backward(loss)\nopt.clip_master_grads(1)\n'
    found = left(text)
    assert 'apex.fp16_utils.FP16_Optimizer' in found
    assert 'FP16_Optimizer.clip_master_grads' in found
    assert 'opt.backward(loss)\nopt.clip_master_grads(1)\n' in migrated(text)


def test_another_variable_of_the_same_name_is_no_fp16_optimizer() -> None:
    text = (
        'from apex.fp16_utils import FP16_Optimizer\n\n\ndef main():\n    opt = FP16_Optimizer(SGD(net.parameters()))\n'
        '    opt.backward(loss)\n\n\ndef other():\n    opt = engine()\n    opt.backward(loss)\n'
    )
    after = migrated(text)
    assert after.endswith('def other():\n    opt = engine()\n    opt.backward(loss)\n')
    assert 'with amp.scale_loss(loss, opt) as scaled_loss:\n        scaled_loss.backward()\n' in after


def test_ddp_before_initialize_is_listed_in_the_same_function_only() -> None:
    text = (
        'from apex import amp\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n'
        'def wrong(m, o):\n    m = DDP(m)\n    return amp.initialize(m, o)\n\n\n'
        'def right(m, o):\n    m, o = amp.initialize(m, o)\n    m = DDP(m)\n\n\ndef elsewhere(m):\n    m = DDP(m)\n'
    )
    assert [note.line for note in migrate(text.encode()).by_hand] == [6]


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_line_ends_and_encoding_stay() -> None:
    text = '# -*- coding: latin-1 -*-\r\nfrom apex import amp  # caf\xe9\r\nx = "\xfc"\r\n'
    result = migrate(text.encode('latin-1'))
    assert result.data == text.replace('apex', 'amp_wrapper').encode('latin-1')
    bare = 'from apex import amp'
    assert migrate(bare.encode()).data == b'from amp_wrapper import amp'
    tabs = 'if 1:\n\tfrom apex.fp16_utils import FP16_Optimizer\n'
    tabs += '\topt = FP16_Optimizer(SGD(m.parameters()))\n\topt.backward(l)\n'
    after = migrated(tabs)
    assert '\n\twith amp.scale_loss(l, opt) as scaled_loss:\n\t\tscaled_loss.backward()\n' in after
    crlf = tabs.replace('\n', '\r\n')
    assert migrated(crlf) == after.replace('\n', '\r\n')


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
    assert [str(path.relative_to(tmp_path)) for path in find([tmp_path, tmp_path / 'a.py'])] == names
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
    from apex_migration import files

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
