# Sparse R-CNN R50-FPN on COCO at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
