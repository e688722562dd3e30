"""Whole runs with mmengine's runners: killed and resumed, sharded, with wrappers inside of the model."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import MMSeparateDistributedDataParallel

from amp_wrapper import AmpUsageError
from scenarios.common import HALF, Here, masters_of, refused, same_on_all_ranks, scaler_of, scenario, weights_of


@scenario
def train(here: Here) -> None:
    """A whole run through mmengine: words are the folder, and 'kill' (rank 1 dies in mid-epoch) or 'resume'."""
    import mmengine.runner.runner
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    mmengine.runner.runner.collect_env = dict

    @HOOKS.register_module(force=True)
    class KillRankOne(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if dist.get_rank() == 1 and runner.iter == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    folder, words = here.folder / here.words[0], here.words[1:]
    case = toy.everything('O2', max_epochs=4)
    case.update(
        launcher='pytorch',
        model_wrapper_cfg=dict(type='MMDistributedDataParallel', broadcast_buffers=False),
        randomness=dict(seed=0, deterministic=True, diff_rank_seed=True),
        log_level='INFO',
        resume='resume' in words,
    )
    if here.device.type == 'cpu':
        case['model_wrapper_cfg']['device_ids'] = None
    if 'kill' in words:
        case['custom_hooks'] = [*case['custom_hooks'], dict(type='KillRankOne')]
    runner = toy.run(folder, **case)
    assert runner.epoch == 4
    same_on_all_ranks(here, weights_of(runner.model), 'weights')
    same_on_all_ranks(here, masters_of(runner.optim_wrapper), 'masters')
    same_on_all_ranks(here, scaler_of(runner.optim_wrapper), 'scaler')
    if here.rank == 0:
        average = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model.state_dict()
        state = {**{f'ema.{k}': v for k, v in average.items()}, **runner.model.module.state_dict()}
        state['scaler'] = torch.cat([value.double() for value in scaler_of(runner.optim_wrapper)])
        torch.save({key: value.cpu() for key, value in state.items()}, folder / 'end.pt')
    del runner


@scenario
def flexible(here: Here) -> None:
    """mmengine's other runner: DDPStrategy is right, and strategies that shard are refused."""
    import mmengine.runner._flexible_runner
    import toy

    if here.device.type == 'cpu':
        # mmengine sets a CUDA device when it starts processes
        torch.cuda.set_device = lambda device: None
    for level in ('O0', 'O2', 'O5'):
        config = toy.toy_config(
            here.folder / level,
            dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.1), accumulative_counts=2),
        )
        wrapping = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
        if here.device.type == 'cpu':
            wrapping['device_ids'] = None
        config.strategy = dict(type='DDPStrategy', model_wrapper=wrapping)
        config.launcher = 'pytorch'
        config.randomness, config.env_cfg = dict(seed=0), {}
        runner = mmengine.runner._flexible_runner.FlexibleRunner.from_cfg(config)
        runner.train()
        assert {p.dtype for n, p in runner.model.named_parameters() if 'fc' in n} == {HALF.get(level, torch.float32)}
        same_on_all_ranks(here, weights_of(runner.model), f'{level} weights')
        same_on_all_ranks(here, masters_of(runner.optim_wrapper), f'{level} masters')
        del runner
    # mmengine mixes the names of the average up, and would fail at the first checkpoint
    config.custom_hooks = [dict(type='EMAHook')]
    config.experiment_name = 'with_average'
    with refused(AmpUsageError, 'EMAHook under DDPStrategy'):
        mmengine.runner._flexible_runner.FlexibleRunner.from_cfg(config).train()


@scenario
def gan_files(here: Here) -> None:
    """A checkpoint of a model with a DDP for each child: plain names, whole on any number of ranks, its average too."""
    import mmengine.runner.runner
    from mmengine.config import Config
    from mmengine.runner import Runner

    mmengine.runner.runner.collect_env = dict
    root = Path(__file__).resolve().parents[3]
    sys.path.insert(0, str(root))
    folder, resume = here.folder / here.words[0], 'resume' in here.words
    config = Config.fromfile(root / 'configs' / 'digits' / 'gan_o2_o5.py')
    config.merge_from_dict(
        {
            'model.generator.width': 4,
            'model.discriminator.width': 4,
            'train_cfg': dict(by_epoch=True, max_epochs=1 if 'half' in here.words else 2, val_interval=5),
            'default_hooks.checkpoint': dict(type='CheckpointHook', interval=1),
            'custom_hooks': [dict(type='EMAHook', momentum=0.1), dict(type='amp_wrapper.ExactResumeHook')],
            'work_dir': str(folder),
            'launcher': 'pytorch',
            'resume': resume,
            'log_level': 'WARNING',
        }
    )
    # a schedule that does not know the end, so that a part of a run is a part
    config.param_scheduler = dict(type='ConstantLR', factor=1.0)
    for loader in ('train_dataloader', 'val_dataloader'):
        config[loader].batch_size = 128
    if here.device.type == 'cpu':
        config.model_wrapper_cfg.device_ids = None
    if here.world == 1:
        config.launcher = 'none'
    runner = Runner.from_cfg(config)
    runner.train()
    average = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model
    if here.world > 1:
        assert isinstance(runner.model, MMSeparateDistributedDataParallel)
        same_on_all_ranks(here, weights_of(runner.model), 'weights')
        same_on_all_ranks(here, average.parameters(), 'average')
    if here.rank == 0:
        saved = torch.load((folder / 'last_checkpoint').read_text(), weights_only=True, map_location='cpu')
        assert not [name for name in saved['state_dict'] if '.module.' in name], list(saved['state_dict'])
        assert not [name for name in saved['ema_state_dict'] if '.module.' in name.removeprefix('module.')]
        # the average stands in the model's place
        flat = [p.detach().float().cpu() for p in average.module.parameters()]
        inner = runner.model.module if here.world > 1 else runner.model
        names = [name.replace('.module.', '.') for name, _ in inner.named_parameters()]
        for name, value in zip(names, flat):
            assert saved['state_dict'][name].equal(value), name
        torch.save({**saved['state_dict'], **saved['ema_state_dict']}, folder / 'end.pt')
    del runner, average
