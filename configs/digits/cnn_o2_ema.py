# cnn_o2.py with an exponential moving average of the weights
_base_ = 'cnn_o2.py'

# The average is taken of the FP32 masters: momentum times a small change would be rounded away in float16. It covers about
# the last 1 / momentum = 20 of the 230 iterations. Validation runs with the average, and so does everything that loads the
# checkpoint's state_dict; the weights that training goes on from are in its ema_state_dict.
custom_hooks = [dict(type='EMAHook', momentum=0.05)]
