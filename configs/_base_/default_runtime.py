# imports register the wrapper, and the models and data sets of the examples
custom_imports = dict(imports=['amp_wrapper', 'examples.classification'], allow_failed_imports=False)
default_scope = 'mmengine'

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=20),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=3, save_best='accuracy/top1'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
log_processor = dict(window_size=20)
randomness = dict(seed=0)
