# DeepLabV3+ R50 on Cityscapes at O1: autocast to float16, dynamic loss scale
_base_ = 'mmseg::deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O1')
