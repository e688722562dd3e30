# HorNet-T-GF on ImageNet at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmpretrain::hornet/hornet-tiny-gf_8xb128_in1k.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
# what mmpretrain's tools/train.py adds to every loader
train_dataloader = dict(collate_fn=dict(type='default_collate'))
val_dataloader = dict(collate_fn=dict(type='default_collate'))
test_dataloader = val_dataloader
