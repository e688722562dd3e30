# YOLOX-S on COCO at O1: autocast to float16, dynamic loss scale
_base_ = 'mmdet::yolox/yolox_s_8xb8-300e_coco.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O1')
