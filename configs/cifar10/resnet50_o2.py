# tools/train.py configs/cifar10/resnet50_o2.py
_base_ = ['../_base_/models/resnet50.py', '../_base_/default_runtime.py']

# write your folder here
data_root = 'data/cifar-10-batches-bin'
model = dict(backbone=dict(small_images=True), num_classes=10)

loader = dict(num_workers=2, persistent_workers=True, collate_fn=dict(type='default_collate'))
train_dataloader = dict(
    batch_size=128,
    dataset=dict(
        type='CIFAR10',
        data_root=data_root,
        train=True,
        pipeline=[dict(type='PadAndCrop', padding=4), dict(type='RandomFlip', prob=0.5)],
    ),
    sampler=dict(type='DefaultSampler', shuffle=True),
    **loader,
)
val_dataloader = dict(
    batch_size=256,
    dataset=dict(type='CIFAR10', data_root=data_root, train=False),
    sampler=dict(type='DefaultSampler', shuffle=False),
    **loader,
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='AmpOptimWrapper',
    opt_level='O2',
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
)
param_scheduler = dict(type='CosineAnnealingLR', T_max=200, by_epoch=True, convert_to_iter_based=True)
train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(enable=False, base_batch_size=128)
