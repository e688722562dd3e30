"""The scripts in ``tools``, as users type them: each runs once."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

import pytest
import toy
from missing import skip_without_fsdp
from processes import ROOT, python, tool

CONFIG = 'configs/digits/cnn_o2.py'
SHORT = ['--cfg-options', 'train_cfg.max_epochs=1', 'log_level=WARNING', 'train_dataloader.batch_size=256']


def test_train_and_test(tmp_path: Path) -> None:
    said = tool('tools/train.py', CONFIG, '--work-dir', str(tmp_path), *SHORT)
    assert 'accuracy/top1' in said and 'epoch_1.pth' in said
    said = tool(
        'tools/test.py', CONFIG, str(tmp_path / 'epoch_1.pth'), '--opt-level', 'O4', '--work-dir', str(tmp_path)
    )
    assert 'Tested at O4: accuracy/top1 ' in said


def test_two_processes_train_on_a_cpu(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = str(listener.getsockname()[1])
    words = ['tools/dist_train.sh', 'configs/digits/cnn_o2_ddp.py', '2', '--work-dir', str(tmp_path), *SHORT]
    assert 'Finished: epoch 1' in tool(*words, CUDA_VISIBLE_DEVICES='', PORT=port)
    assert toy.checkpoint(tmp_path)['meta']['epoch'] == 1


@pytest.mark.parametrize(
    ('name', 'said'), [('slurm_train', 'PARTITION JOB_NAME CONFIG WORK_DIR'), ('dist_train', 'PROCESSES')]
)
def test_mistakes_are_answered_without_a_traceback(name: str, said: str) -> None:
    answer = tool(f'tools/{name}.sh', ok=False)
    assert said in answer and 'Traceback' not in answer


def test_gpu_check_plans_what_exists() -> None:
    """Tests, benchmarks and sanitizers, without a GPU."""
    done = python('-m', 'benchmarks.gpu_check', '--dry')
    assert done.returncode == 0, done.stderr
    stages = dict(zip(*[iter(re.split(r'^== (.+)\n', done.stdout, flags=re.M)[1:])] * 2))
    assert all(stages.values()) and {'ops', 'step', 'engine', 'end-to-end', 'sanitizer', 'ddp'} == set(stages)
    assert 'build-ops --cuda' in stages['ops'] and 'benchmarks.levels' in stages['end-to-end']
    assert all(check in stages['sanitizer'] for check in ('memcheck', 'racecheck', 'initcheck', 'synccheck'))
    files = set(re.findall(r'tests/\S+\.py', done.stdout))
    assert files and all('--device cuda' in stages[stage] for stage in ('ops', 'step', 'engine', 'ddp'))
    assert [file for file in files if not (ROOT / file).is_file()] == []
    modules = set(re.findall(r'benchmarks\.\w+', done.stdout))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize(
    'name',
    [
        'ops',
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ('step', 'levels', 'overhead', 'compiled', 'distributed', 'sharding', 'fidelity')
        ),
    ],
)
def test_benchmarks_print_tables(name: str) -> None:
    if name == 'sharding':
        skip_without_fsdp()
    done = python('-m', f'benchmarks.{name}', '--quick')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('# ') and '| --- |' in done.stdout
