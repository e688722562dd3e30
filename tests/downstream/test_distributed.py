"""Two processes over gloo, started as users start them: a project's config, its own ``tools/train.py``, and one option."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import data
import pytest
import torch
from conftest import skip_without_ops
from flows import small_config, tool, write_config
from mmengine.config import Config
from zoo import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
ON_RANKS = Path(__file__).parent / 'on_ranks'
sys.path.append(str(ON_RANKS))

import rank_witness

EPOCHS = 3
#: What mmengine needs on a CPU; with GPUs, none of these words are written.
ON_CPU = (
    'env_cfg.dist_cfg.backend=gloo',
    # a rank that waits for one that failed should not wait for half an hour
    'env_cfg.dist_cfg.timeout=100',
    'model_wrapper_cfg.type=MMDistributedDataParallel',
    'model_wrapper_cfg.device_ids=None',
    'model_wrapper_cfg.broadcast_buffers=False',
)
CAST = {'O2': 'torch.float16', 'O5': 'torch.bfloat16'}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training on two ranks.

    Attributes:
        what: For ids and tables.
        model: Name in the zoo.
        level: Opt level.
        words: For ``--cfg-options``.
        amp: Whether ``--amp`` chooses the wrapper, and not ``--cfg-options``.
        config: What the user's config says beside the project's own.
        counts: Iterations of a step, and of an epoch.
        idle: How the names of the parameters begin that the loss does not reach.
    """

    what: str
    model: str
    level: str
    words: tuple[str, ...] = ()
    amp: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: int = 1
    idle: str = ''


#: Scores from the third stage; the fourth runs, and nobody uses what comes out.
_THIRD_STAGE = dict(
    model=dict(decode_head=dict(in_index=2, in_channels=64), auxiliary_head=dict(in_index=1, in_channels=32))
)
_AVERAGE = dict(custom_hooks=[dict(type='EMAHook', momentum=0.1)])
JOBS = (
    Job('plain', 'ResNet-18', 'O2', ('optim_wrapper.loss_scale=8192',)),
    # one image at a time, so that an accumulation is an epoch, and the accumulations of two ranks have no image in common
    Job(
        'accumulation',
        'ResNet-18',
        'O2',
        (
            'optim_wrapper.loss_scale=8192',
            'optim_wrapper.accumulative_counts=2',
            'train_dataloader.batch_size=1',
        ),
        counts=2,
    ),
    Job('clip_grad', 'ViT', 'O5'),
    Job(
        'unused parameters',
        'FCN',
        'O5',
        ('model_wrapper_cfg.find_unused_parameters=True',),
        config=_THIRD_STAGE,
        idle='backbone.layer4.',
    ),
    Job('--amp', 'PSPNet', 'O1', ('optim_wrapper.loss_scale.init_scale=64',), amp=True),
    Job('EMAHook', 'RetinaNet', 'O5', config=_AVERAGE),
    Job('--amp', 'Faster R-CNN', 'O4', ('optim_wrapper.opt_level=O4',), amp=True),
)


def user_config(job: Job, tmp_path: Path, pictures: Path, **witness: Any) -> Path:
    """A file as a user has it, with GPUs in mind; the hook that checks is all that is added."""
    case = BY_NAME[job.model]
    skip_without_ops(case.project)
    cfg: Config = small_config(case, data.write(pictures, case.size), tmp_path / 'run')
    cfg.train_dataloader.sampler.shuffle = True
    cfg.train_cfg = dict(by_epoch=True, max_epochs=EPOCHS, val_interval=EPOCHS)
    for key in ('val_evaluator', 'test_evaluator'):
        cfg[key] = [one for one in cfg[key] if one['type'] != 'mmengine.TypeWatch']
    cfg.env_cfg = dict(cudnn_benchmark=False, dist_cfg=dict(backend='nccl'))
    # --amp writes the bare name, which is ours where the package is imported; the prefixed name imports it by itself
    cfg.custom_imports = dict(imports=['amp_wrapper'] if job.amp else [], allow_failed_imports=False)
    cfg.merge_from_dict({key: value for key, value in job.config.items() if key != 'custom_hooks'})
    cfg.custom_hooks = [*cfg.custom_hooks, *job.config.get('custom_hooks', [])]
    cfg.custom_imports['imports'].append('rank_witness')
    cfg.custom_hooks.append(dict(type='mmengine.RankWitness', report=str(tmp_path / 'seen.json'), **witness))
    return write_config(cfg, tmp_path / f'{case.slug}.py')


def free_port() -> int:
    with socket.socket() as found:
        found.bind(('127.0.0.1', 0))
        return int(found.getsockname()[1])


def launch(job: Job, config: Path, *words: str, **variables: str) -> tuple[int, str]:
    """``torchrun``, the project's ``tools/train.py``, two ranks.

    Returns:
        The exit code, and what the processes said.
    """
    options = [*ON_CPU, *job.words]
    if not job.amp:
        options += ['optim_wrapper.type=amp_wrapper.AmpOptimWrapper', f'optim_wrapper.opt_level={job.level}']
    starter = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2']
    starter += ['--master_port', str(free_port()), str(tool(BY_NAME[job.model].project, 'train.py')), str(config)]
    flags = ['--launcher', 'pytorch', *(['--amp'] if job.amp else [])]
    path = os.pathsep.join([str(ON_RANKS), str(ROOT), os.environ.get('PYTHONPATH', '')])
    process = subprocess.Popen(
        [*starter, *flags, '--cfg-options', *options, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=config.parent,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path, **variables},
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        # the ranks are children of torchrun's
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        pytest.fail(f'two ranks did not end: {said[-3000:]}')
    return process.returncode, said


def check(job: Job, seen: dict[str, Any], first: int, iterations: int) -> None:
    """Whether what rank 0 reported is the training that was meant."""
    assert seen['world'] == 2 and seen['model'] == 'MMDistributedDataParallel'
    assert seen['wrapper'] == 'amp_wrapper.openmmlab.optim_wrapper.AmpOptimWrapper' and seen['level'] == job.level
    assert (CAST[job.level] in seen['types']) if job.level in CAST else (seen['types'] == ['torch.float32'])
    assert seen['masters'] == ['torch.float32']
    assert (seen['first'], seen['iterations']) == (first, iterations)
    assert seen['steps'] * job.counts == iterations
    # the ranks' own gradients are no mean, or the comparison would prove nothing
    assert seen['told_apart'] > 0.5
    assert {'weights', 'masters', 'optimizer', 'scale'} <= set(seen['compared'])
    assert ('average' in seen['compared']) == ('custom_hooks' in job.config)
    assert seen['unused'] == bool(job.idle) == bool(seen['idle'])
    assert all(name.startswith(job.idle) for name in seen['idle'])


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return tmp_path / 'pictures'


@pytest.mark.parametrize('job', JOBS, ids=lambda job: f'{BY_NAME[job.model].slug}-{job.level}-{job.what}')
def test_two_ranks(job: Job, pictures: Path, tmp_path: Path) -> None:
    """Different data, averaged gradients, the same bits at the end: :class:`rank_witness.RankWitness` ends with an error
    otherwise."""
    config = user_config(job, tmp_path, pictures)
    code, said = launch(job, config)
    assert code == 0, said[-3000:]
    seen = json.loads((tmp_path / 'seen.json').read_text())
    check(job, seen, 0, EPOCHS * job.counts)
    saved = torch.load(tmp_path / 'run' / f'epoch_{EPOCHS}.pth', map_location='cpu', weights_only=True)
    assert {value.dtype for value in saved['state_dict'].values() if value.is_floating_point()} == {torch.float32}
    if job.what == 'plain':
        code, said = launch(job, config, 'resume=True', f'train_cfg.max_epochs={EPOCHS + 1}')
        assert code == 0, said[-3000:]
        check(job, json.loads((tmp_path / 'seen.json').read_text()), EPOCHS, 1)


def test_the_check_of_data_sees_one_batch_on_both_ranks() -> None:
    assert rank_witness.same_data([['a', 'b'], ['c', 'd']]) == []
    assert rank_witness.same_data([['a', 'b'], ['c', 'b']]) == ['the ranks saw the same data in 1 of 2 iterations']
    assert rank_witness.same_data([[], []]) != []


def test_the_check_of_gradients_sees_a_reducer_that_was_not_rebuilt(pictures: Path, tmp_path: Path) -> None:
    """Beside FP32 BatchNorm."""
    code, said = launch(JOBS[0], user_config(JOBS[0], tmp_path, pictures), RANK_WITNESS_NO_REBUILD='1')
    assert code != 0 and 'numbers are not the mean over ranks' in said, said[-3000:]


def test_the_check_of_weights_sees_a_reducer_that_was_not_rebuilt(pictures: Path, tmp_path: Path) -> None:
    """Where every parameter is cast: torch itself says nothing, and the training goes on to its end."""
    job = next(job for job in JOBS if job.model == 'ViT')
    code, said = launch(job, user_config(job, tmp_path, pictures, judge_gradients=False), RANK_WITNESS_NO_REBUILD='1')
    assert code != 0 and 'end: the ranks differ in weights' in said, said[-3000:]
    assert (tmp_path / 'run' / f'epoch_{EPOCHS}.pth').exists()
