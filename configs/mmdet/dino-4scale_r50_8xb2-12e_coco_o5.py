# DINO R50 on COCO at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
