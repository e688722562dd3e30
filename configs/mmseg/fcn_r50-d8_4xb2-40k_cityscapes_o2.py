# FCN R50 on Cityscapes at O2: float16 model, FP32 BatchNorm, FP32 masters, dynamic loss scale
_base_ = 'mmseg::fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2')
