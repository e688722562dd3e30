# SegFormer MiT-B0 on ADE20K at O5: bfloat16 model, FP32 BatchNorm, FP32 masters
_base_ = 'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'
optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O5')
