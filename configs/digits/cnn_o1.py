# FP32 weights, per-op casts to float16, dynamic loss scale
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/models/digits_cnn.py',
    '../_base_/schedules/digits_10e.py',
    '../_base_/default_runtime.py',
]
optim_wrapper = dict(opt_level='O1')
