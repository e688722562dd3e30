# ConvNeXt-T on ImageNet at O4: autocast to bfloat16
_base_ = 'mmpretrain::convnext/convnext-tiny_32xb128_in1k.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O4')
# what mmpretrain's tools/train.py adds to every loader
train_dataloader = dict(collate_fn=dict(type='default_collate'))
val_dataloader = dict(collate_fn=dict(type='default_collate'))
test_dataloader = val_dataloader
