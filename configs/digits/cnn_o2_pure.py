# cnn_o2.py as a pure-Python config: classes instead of names, and no custom_imports, which mmengine ignores here
from mmengine.dataset import DefaultSampler
from mmengine.hooks import CheckpointHook, DistSamplerSeedHook, IterTimerHook, LoggerHook, ParamSchedulerHook
from mmengine.optim import CosineAnnealingLR
from torch.optim import SGD
from torch.utils.data import default_collate

from amp_wrapper import AmpOptimWrapper
from examples.classification import Accuracy, ConvNet, Digits, ImageClassifier, Normalize

default_scope = 'mmengine'
model = dict(
    type=ImageClassifier,
    data_preprocessor=dict(type=Normalize, mean=[4.9], std=[6.0]),
    backbone=dict(type=ConvNet, in_channels=1, channels=[16, 32, 64]),
    in_channels=64,
    num_classes=10,
)
train_dataloader = dict(
    batch_size=64,
    dataset=dict(type=Digits, train=True),
    sampler=dict(type=DefaultSampler, shuffle=True),
    num_workers=0,
    collate_fn=dict(type=default_collate),
)
val_dataloader = dict(
    batch_size=256,
    dataset=dict(type=Digits, train=False),
    sampler=dict(type=DefaultSampler, shuffle=False),
    num_workers=0,
    collate_fn=dict(type=default_collate),
)
test_dataloader = val_dataloader
val_evaluator = dict(type=Accuracy)
test_evaluator = val_evaluator

optim_wrapper = dict(
    type=AmpOptimWrapper,
    opt_level='O2',
    optimizer=dict(type=SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = dict(type=CosineAnnealingLR, T_max=10, by_epoch=True, convert_to_iter_based=True)
train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=1)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(
    timer=dict(type=IterTimerHook),
    logger=dict(type=LoggerHook, interval=20),
    param_scheduler=dict(type=ParamSchedulerHook),
    checkpoint=dict(type=CheckpointHook, interval=1, max_keep_ckpts=3, save_best='accuracy/top1'),
    sampler_seed=dict(type=DistSamplerSeedHook),
)
log_processor = dict(window_size=20)
randomness = dict(seed=0)
