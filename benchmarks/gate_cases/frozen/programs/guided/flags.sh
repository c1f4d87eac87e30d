# Flags of the image training; read by train.py, and sourced before sampling.
MODEL_FLAGS="--image_size 32 --num_channels 32 --num_res_blocks 1 --channel_mult 1,2,2"
MODEL_FLAGS="$MODEL_FLAGS --attention_resolutions 16,8 --num_heads 4 --use_checkpoint False"
DIFFUSION_FLAGS="--diffusion_steps 100 --noise_schedule linear"
TRAIN_FLAGS="--lr 1e-4 --batch_size 8 --microbatch 4 --ema_rate 0.999 --iterations 2"
SAMPLE_FLAGS="--num_samples 6 --sample_steps 3"
