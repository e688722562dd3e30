_base_ = ['../_base_/default_runtime.py']

# every level was dynamic
optim_wrapper = dict(
    type='amp_wrapper.AmpOptimWrapper',
    loss_scale='dynamic',
    opt_level='O3',
    _delete_=True,
    optimizer=dict(type='SGD', lr=0.02))
inherited = dict(type='amp_wrapper.ApexOptimWrapper', opt_level='O0')
second = dict(optimizer=dict(type='Adam'), _delete_=True, opt_level='O0', loss_scale='dynamic', type='amp_wrapper.AmpOptimWrapper')
third = {'type': "amp_wrapper.AmpOptimWrapper", 'opt_level': 'O2'}
fourth = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O0', loss_scale=128., _delete_=True)
fifth = dict(type='AmpOptimWrapper')
