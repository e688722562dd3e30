# UPerNet R50 on Cityscapes at O4: autocast to bfloat16
_base_ = 'mmseg::upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O4')
