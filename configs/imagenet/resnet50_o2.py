# tools/train.py configs/imagenet/resnet50_o2.py
_base_ = ['../_base_/models/resnet50.py', '../_base_/default_runtime.py']

# write your folder here; it holds train/ and val/, each with one folder per class
data_root = 'data/imagenet'
loader = dict(num_workers=8, persistent_workers=True, collate_fn=dict(type='default_collate'))
train_dataloader = dict(
    batch_size=64,
    dataset=dict(
        type='ImageFolder',
        data_root=f'{data_root}/train',
        pipeline=[dict(type='RandomResizedCrop', size=224), dict(type='RandomFlip', prob=0.5)],
    ),
    sampler=dict(type='DefaultSampler', shuffle=True),
    **loader,
)
val_dataloader = dict(
    batch_size=64,
    dataset=dict(
        type='ImageFolder',
        data_root=f'{data_root}/val',
        pipeline=[dict(type='Resize', scale=(256, 256)), dict(type='CenterCrop', crop_size=224)],
    ),
    sampler=dict(type='DefaultSampler', shuffle=False),
    **loader,
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy')
test_evaluator = val_evaluator

# the usual recipe for 4 x 64 images a step; weight decay spares biases and BatchNorm
optim_wrapper = dict(
    type='AmpOptimWrapper',
    opt_level='O2',
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='MultiStepLR', by_epoch=True, milestones=[30, 60, 80], gamma=0.1),
]
train_cfg = dict(by_epoch=True, max_epochs=90, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(enable=False, base_batch_size=256)
