# DETR R50 on COCO at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmdet::detr/detr_r50_8xb2-150e_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
