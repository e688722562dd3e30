fp16 = dict(loss_scale=512.)
optimizer_config = dict(type='Fp16OptimizerHook', loss_scale='dynamic')
runner = dict(type='EpochBasedRunnerAmp', max_epochs=12)
swin_config = dict(
    type="DistOptimizerHook",
    update_interval=1,
    grad_clip=None,
    use_fp16=True,
)
