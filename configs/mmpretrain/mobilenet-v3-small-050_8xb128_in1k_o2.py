# MobileNetV3-small 0.5 on ImageNet at O2: float16 model, FP32 BatchNorm, FP32 masters, dynamic loss scale
_base_ = 'mmpretrain::mobilenet_v3/mobilenet-v3-small-050_8xb128_in1k.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2')
# what mmpretrain's tools/train.py adds to every loader
train_dataloader = dict(collate_fn=dict(type='default_collate'))
val_dataloader = dict(collate_fn=dict(type='default_collate'))
test_dataloader = val_dataloader
