optim_wrapper = dict(
    type='AmpOptimWrapper',
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=5e-4),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = dict(type='CosineAnnealingLR', T_max=10, by_epoch=True, convert_to_iter_based=True)
train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(enable=False, base_batch_size=64)
