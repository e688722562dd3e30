# A conditional DCGAN with a level for each network: generator at O2, discriminator at O5
_base_ = ['../_base_/datasets/digits.py', '../_base_/default_runtime.py']
custom_imports = dict(imports=['amp_wrapper', 'examples.classification', 'examples.gan'], allow_failed_imports=False)

model = dict(
    type='GAN',
    # the images' 0 to 16 become -1 to 1
    data_preprocessor=dict(type='Normalize', mean=[8.0], std=[8.0]),
    generator=dict(type='DigitGenerator', noise_dim=32, num_classes=10, width=32),
    discriminator=dict(type='DigitDiscriminator', num_classes=10, width=32, dropout=0.3),
)
val_dataloader = dict(dataset=dict(type='DigitsWithNoise', noise_dim=32))
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type='DigitQuality')
test_evaluator = val_evaluator

optim_wrapper = dict(
    constructor='WrapperPerModule',
    generator=dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='Adam', lr=1e-3, betas=(0.5, 0.999))),
    discriminator=dict(
        type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='Adam', lr=1e-3, betas=(0.5, 0.999))
    ),
)
# one schedule for each optimizer
param_scheduler = dict(type='CosineAnnealingLR', T_max=30, by_epoch=True, convert_to_iter_based=True)
train_cfg = dict(by_epoch=True, max_epochs=30, val_interval=5)
val_cfg = dict()
test_cfg = dict()

default_hooks = dict(checkpoint=dict(interval=5, save_best='gan/frechet', rule='less'))

# every process draws noise of its own
randomness = dict(seed=0, diff_rank_seed=True)
# For tools/dist_train.sh: one DDP for each network. A single one around both would wait in each turn for the gradients of the
# network whose turn it is not. A single process takes no notice of it.
model_wrapper_cfg = dict(
    type='MMSeparateDistributedDataParallel',
    find_unused_parameters=False,
    broadcast_buffers=False,
)
