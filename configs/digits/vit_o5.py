# A small vision transformer: bfloat16 model, FP32 masters, no loss scale; a fused optimizer, warm-up, an average of the weights
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/models/digits_vit.py',
    '../_base_/default_runtime.py',
]
optim_wrapper = dict(
    type='AmpOptimWrapper',
    opt_level='O5',
    optimizer=dict(type='amp_wrapper.FusedAdamW', lr=2e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
    # neither LayerNorm nor biases
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=1, T_max=19, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=2)
val_cfg = dict()
test_cfg = dict()
custom_hooks = [dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1)]
