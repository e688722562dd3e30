# RetinaNet R50-FPN on COCO at O2: float16 model, FP32 BatchNorm, FP32 masters, dynamic loss scale
_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2')
