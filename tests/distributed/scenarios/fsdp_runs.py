"""Whole runs of mmengine with a sharded model: killed and resumed, on as many ranks and on others, in DDP and alone."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from amp_wrapper import AmpConfigError
from amp_wrapper.checkpoint import file as checkpoint_file
from amp_wrapper.checkpoint import folder as shard_folder
from amp_wrapper.checkpoint import sharded
from scenarios.common import Here, refused, scenario

WRAPPERS: dict[str, dict[str, Any]] = {
    'ddp': dict(type='MMDistributedDataParallel', broadcast_buffers=False),
    'fsdp': dict(type='amp_wrapper.MMFullyShard', blocks=['Linear']),
    'grid': dict(type='amp_wrapper.MMFullyShard', mesh=(2, 1)),
    'shards': dict(type='amp_wrapper.MMFullyShard', blocks=['Linear'], checkpoints='sharded'),
    'async': dict(type='amp_wrapper.MMFullyShard', checkpoints='async'),
    'apart': dict(type='amp_wrapper.MMFullyShard', no_sync=True, reduce_dtype='float32'),
}


def settings(here: Here, wrapper: str, level: str, epochs: int = 2) -> dict[str, Any]:
    """All that mmengine has: accumulation, clipping, an average, early stopping, the best file, dropout, augmentation."""
    import mmengine.runner.runner
    import toy

    mmengine.runner.runner.collect_env = dict
    case = toy.everything(level, max_epochs=epochs)
    case.update(
        launcher='pytorch' if here.world > 1 else 'none',
        model_wrapper_cfg=dict(WRAPPERS[wrapper]),
        randomness=dict(seed=0, deterministic=True, diff_rank_seed=True),
        log_level='INFO',
        resume='resume' in here.words,
    )
    if here.device.type == 'cpu' and wrapper == 'ddp':
        case['model_wrapper_cfg']['device_ids'] = None
    for word in here.words:
        if word.startswith('Fused') or word == 'AdamW':
            case['optim_wrapper']['optimizer'] = dict(type=word, lr=0.01, weight_decay=1e-3)
        if word == 'zero':
            # after the name of the optimizer inside
            inner = case['optim_wrapper']['optimizer']
            inner['optimizer_type'], inner['type'] = inner['type'], 'ZeroRedundancyOptimizer'
        if word == 'one':
            # DDP and FSDP2 sum up several micro-batches in another order
            case['optim_wrapper']['accumulative_counts'] = 1
            # and norms
            case['optim_wrapper']['clip_grad'] = dict(type='value', clip_value=0.02)
    return case


@scenario
def fsdp_train(here: Here) -> None:
    """Words: folder, wrapper, level, optimizer, 'zero', 'one', and 'kill' (rank 1 dies in mid-epoch), 'kill-writing' (it dies
    while it writes its shards for the third time) or 'resume'."""
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    from amp_wrapper.openmmlab.sharding import MMFullyShard

    @HOOKS.register_module(force=True)
    class KillRankOne(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if dist.get_rank() == 1 and runner.iter == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    folder, wrapper, level = here.words[:3]
    case = settings(here, wrapper, level)
    if 'kill' in here.words:
        case['custom_hooks'] = [*case['custom_hooks'], dict(type='KillRankOne')]
    if 'kill-writing' in here.words:
        original, calls = shard_folder.look_at, itertools.count()

        def look_at(path: Any) -> Any:
            if here.rank == 1 and next(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path)

        shard_folder.look_at = look_at
    runner = toy.run(here.folder / folder, **case)
    assert runner.epoch == 2
    if here.world > 1:
        assert isinstance(runner.model, MMFullyShard) is (wrapper != 'ddp')
    del runner


@scenario
def fsdp_other_calls(here: Here) -> None:
    """Validation before training, tests after it, an average among them; what is measured is what DDP measures."""
    import toy
    from mmengine.runner import Runner

    scores = {}
    for wrapper in ('ddp', 'fsdp', 'grid'):
        case = settings(here, wrapper, 'O5', epochs=1)
        case['optim_wrapper']['accumulative_counts'] = 1
        case['custom_hooks'] = case['custom_hooks'][:1]
        case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
        config = toy.toy_config(here.folder / wrapper, **case)
        config.test_dataloader, config.test_cfg = config.val_dataloader, {}
        config.test_evaluator = config.val_evaluator
        torch.manual_seed(0)
        runner = Runner.from_cfg(config)
        before = runner.val()
        runner.train()
        scores[wrapper] = [before, runner.val(), runner.test()]
        del runner
    assert scores['fsdp'] == scores['ddp'] == scores['grid'], scores


@scenario
def fsdp_refused_runs(here: Here) -> None:
    """Configs that mean nothing end before the training, with what to write."""
    import toy

    for words, kind, text in (
        (dict(mesh=(here.world + 1,)), AmpConfigError, 'product is the number of processes'),
        (dict(blocks=['Linaer']), AmpConfigError, "did you mean 'Linear'"),
        (dict(block='Linear'), TypeError, 'block'),
        (dict(reduce_dtype='int8'), AmpConfigError, 'int8'),
    ):
        case = settings(here, 'fsdp', 'O5')
        case['model_wrapper_cfg'] = dict(type='amp_wrapper.MMFullyShard', **words)
        with refused(kind, text):
            toy.run(here.folder / 'refused', **case)
    case = settings(here, 'fsdp', 'O5')
    case['optim_wrapper']['master_weights'] = 'split'
    case['optim_wrapper']['optimizer'] = dict(type='FusedAdamW', lr=0.1, weight_decay=0.1)
    with refused(AmpConfigError, 'nothing is kept twice'):
        toy.run(here.folder / 'split', **case)


@scenario
def fsdp_flexible(here: Here) -> None:
    """mmengine's other runner: the file of ``FullyShardStrategy`` is that of DDP, bit for bit."""
    import mmengine.runner._flexible_runner as flexible
    import toy
    from bits import differences

    if here.device.type == 'cpu':
        # mmengine sets a CUDA device when it starts processes
        torch.cuda.set_device = lambda device: None
    wrapping: dict[str, Any] = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
    if here.device.type == 'cpu':
        wrapping['device_ids'] = None
    strategies = {
        'ddp': dict(type='DDPStrategy', model_wrapper=wrapping),
        'fsdp': dict(type='amp_wrapper.FullyShardStrategy'),
        'shards': dict(type='amp_wrapper.FullyShardStrategy', checkpoints='async'),
        'resumed': dict(type='amp_wrapper.FullyShardStrategy', blocks='Linear', activation_checkpointing=['fc']),
    }
    for level in ('O0', 'O2', 'O5'):
        files = {}
        for name, strategy in strategies.items():
            folder = here.folder / f'{name}_{level}'
            config = toy.toy_config(
                folder, dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
            )
            config.strategy = strategy
            config.launcher = 'pytorch'
            config.experiment_name = folder.name
            config.randomness, config.env_cfg = dict(seed=0), {}
            config.default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1))
            config.custom_hooks = [dict(type='amp_wrapper.ExactResumeHook')]
            if name == 'resumed':
                config.resume, config.load_from = True, str(here.folder / f'shards_{level}' / 'epoch_1.pth')
            runner = flexible.FlexibleRunner.from_cfg(config)
            runner.train()
            dist.barrier()
            last = (folder / 'last_checkpoint').read_text()
            assert sharded.is_folder(last) is (name == 'shards')
            files[name] = sharded.load(last) if name == 'shards' else checkpoint_file.load(last)
            del runner
        plain = {key.removeprefix('module.'): value for key, value in files['ddp']['state_dict'].items()}
        assert differences(dict(files['fsdp']['state_dict']), plain) == []
        for name, part in itertools.product(('shards', 'resumed'), ('state_dict', 'optimizer')):
            assert differences(files['fsdp'][part], files[name][part]) == [], (level, name, part)
