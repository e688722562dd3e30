# FCOS R50-FPN on COCO at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
