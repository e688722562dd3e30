# The transformer over FSDP2: each layer is gathered when it runs, shards are saved while the training goes on
#   tools/dist_train.sh configs/digits/vit_o5_fsdp.py 2
_base_ = ['./vit_o5.py']

model_wrapper_cfg = dict(type='amp_wrapper.MMFullyShard', blocks=['TransformerLayer'], checkpoints='sharded')
