# MAE pre-training of ViT-B/16 on ImageNet at O2: float16 model, FP32 BatchNorm, FP32 masters, dynamic loss scale
_base_ = 'mmpretrain::mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k.py'
# its own AmpOptimWrapper asks for a dynamic scale, which stays
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2')
# what mmpretrain's tools/train.py adds to every loader
train_dataloader = dict(collate_fn=dict(type='default_collate'))
