# Deformable DETR R50 on COCO at O4: autocast to bfloat16
_base_ = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O4')
