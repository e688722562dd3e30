# ResNet-18 on ImageNet at O1: autocast to float16, dynamic loss scale
_base_ = 'mmpretrain::resnet/resnet18_8xb32_in1k.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O1')
# what mmpretrain's tools/train.py adds to every loader
train_dataloader = dict(collate_fn=dict(type='default_collate'))
val_dataloader = dict(collate_fn=dict(type='default_collate'))
test_dataloader = val_dataloader
