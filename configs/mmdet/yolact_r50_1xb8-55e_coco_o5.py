# YOLACT R50 on COCO at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmdet::yolact/yolact_r50_1xb8-55e_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
